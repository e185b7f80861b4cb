"""Layers of experts with random codes, of several widths."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from exl2flow.kernels import (
    ExpertBank,
    ExpertMatrices,
    Group,
    NormArgs,
    PackedMatrix,
    RouterArgs,
    RouterRule,
    pack_blocks,
    pack_codes,
    pack_scales,
)

BITS = (4, 2, 3, 5, 6, 8)


def packed(k: int, n: int, bits: int, *, bias: bool, device: str) -> PackedMatrix:
    """Return a matrix with groups of two widths, whose results are about as large as its input."""
    half = k // 64 * 32
    groups = [
        Group(bits=wide, start=start, rows=rows)
        for wide, start, rows in ((bits, 0, half), (4, half, k - half))
        if rows
    ]
    codes = torch.cat([torch.randint(1 << g.bits, (g.rows, n), dtype=torch.uint8) for g in groups])
    codes = torch.nn.functional.pad(codes, (0, -n % 32))
    maxima = torch.tensor([4 * k**-0.5 / 2**g.bits for g in groups]).half()
    scales = torch.randint(8, 16, (len(groups), codes.shape[1]), dtype=torch.uint8)
    words = pack_blocks(pack_codes(codes, groups), pack_scales(scales, maxima), groups)
    return PackedMatrix(
        words=words.to(device),
        groups=tuple(groups),
        order=torch.randperm(k).to(device),
        columns=n,
        bias=(torch.randn(n) / 4).half().to(device) if bias else None,
    )


def some_of(whole: ExpertBank, ids: Sequence[int]) -> ExpertBank:
    """Return a layer with some of its experts, as a rank has it."""
    places = torch.full((len(whole.experts),), -1)
    places[list(ids)] = torch.arange(len(ids))
    experts = tuple(whole.experts[index] for index in ids)
    return replace(whole, experts=experts, places=places.to(whole.router.weight.device))


def bank(
    rule: RouterRule,
    *,
    size: int,
    inner: int,
    shared: int = 0,
    gated: bool = False,
    biases: bool = False,
    corrected: bool = False,
    activation: str = "silu",
    multiplier: float = 1.0,
    centered: bool = False,
    device: str = "cpu",
    bits: Sequence[int] = BITS,
) -> ExpertBank:
    """Return a layer; size, inner: of hidden states and of experts; shared: of the shared one."""

    def expert(width: int, index: int) -> ExpertMatrices:
        gate, up = (
            packed(size, width, bits[(index + i) % len(bits)], bias=biases, device=device)
            for i in range(2)
        )
        down = packed(width, size, bits[(index + 2) % len(bits)], bias=biases, device=device)
        return ExpertMatrices(gate, replace(up, order=gate.order), down)

    def tensor(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape) * scale).to(device)

    return ExpertBank(
        norm=NormArgs(
            weight=(torch.rand(size) + 0.5).half().to(device), eps=1e-5, centered=centered
        ),
        router=RouterArgs(
            rule=rule,
            weight=tensor(rule.experts, size, scale=2 * size**-0.5),
            bias=tensor(rule.experts) if biases else None,
            correction=tensor(rule.experts, scale=0.1) if corrected else None,
        ),
        experts=tuple(expert(inner, index) for index in range(rule.experts)),
        shared=expert(shared, 1) if shared else None,
        shared_gate=tensor(1, size, scale=size**-0.5) if gated else None,
        activation=activation,
        multiplier=multiplier,
    )
