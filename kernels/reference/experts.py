"""The torch implementation of a layer of experts."""

import torch

from exl2flow.kernels.interface.activations import ACTIVATIONS, GATED_ACTIVATIONS
from exl2flow.kernels.interface.experts import ExpertBank, ExpertMatrices
from exl2flow.kernels.interface.packed import PackedMatrix, decode_packed
from exl2flow.kernels.reference.router import route
from exl2flow.kernels.reference.steps import norm


def experts(hidden: torch.Tensor, bank: ExpertBank) -> torch.Tensor:
    """Return hidden states fp16 (rows, hidden) after a layer's experts; sums are fp32.

    Of a bank with some of them: the sum of what these return, fp32 (rows, hidden).
    An expert's weight multiplies its output, or its input if the rule `scales_input`.
    """
    x = hidden if bank.norm is None else norm(hidden, bank.norm)
    routes, rule = route(x, bank.router), bank.router.rule
    ids = routes.ids if bank.places is None else bank.places[routes.ids]
    total = torch.zeros_like(x, dtype=torch.float32)
    for index, expert in enumerate(bank.experts):
        tokens, slots = torch.where(ids == index)
        weights = routes.weights[tokens, slots][:, None]
        if rule.scales_input:
            y = _output(x[tokens] * weights.half(), expert, bank.activation)
        else:
            y = _output(x[tokens], expert, bank.activation) * weights
        total.index_add_(0, tokens, y)
    if bank.shared is not None:
        y = _output(x, bank.shared, bank.activation)
        if bank.shared_gate is not None:
            y = y * torch.nn.functional.linear(x.float(), bank.shared_gate).sigmoid().half()
        total += y
    if bank.places is not None:
        return total
    return hidden + (total * bank.multiplier).half()


def _output(x: torch.Tensor, expert: ExpertMatrices, activation: str) -> torch.Tensor:
    """Return an expert's outputs fp32 (n, hidden) for x fp16 (n, hidden)."""
    gate, up = (_product(x, matrix).half() for matrix in (expert.gate, expert.up))
    if activation in GATED_ACTIVATIONS:
        inner = GATED_ACTIVATIONS[activation](gate, up)
    else:
        inner = (ACTIVATIONS[activation](gate.float()) * up.float()).half()
    return _product(inner, expert.down)


def _product(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    y = x.float() @ decode_packed(matrix).float()
    return y if matrix.bias is None else y + matrix.bias.float()
