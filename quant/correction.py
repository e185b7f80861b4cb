"""Correct the target of rounding for what the sublayers before have changed.

Rounding for quantized inputs X̂ towards W keeps X̂W, not the source's XW. The least-squares target
for the latter is W + (X̂ᵀX̂)⁻¹ X̂ᵀ(X - X̂) W; a strength below 1 goes part of the way.
"""

from collections.abc import Mapping

import torch

from exl2flow.model import DenseLinear, Linear, Sublayer
from exl2flow.quant.hessian import LEAST_DAMPING
from exl2flow.quant.source import device_of


def cross_products(
    sublayer: Sublayer, quantized: torch.Tensor, source: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return capture name → `Σ X̂ᵀ(X - X̂) / rows`, fp32 (k, k).

    Args:
        sublayer: with the source's weights.
        quantized: states fp32 (rows, t, hidden) that the quantized model puts in.
        source: states of the same rows in the source.
    """
    sums: dict[str, torch.Tensor] = {}
    for found, expected in zip(quantized, source, strict=True):
        read = _read(sublayer, found)
        wanted = _read(sublayer, expected)
        for capture, x in read.items():
            product = x.T @ (wanted[capture] - x)
            sums[capture] = sums[capture] + product if capture in sums else product
    return {capture: total / len(quantized) for capture, total in sums.items()}


def corrected_linears(
    sublayer: Sublayer,
    hessians: Mapping[str, torch.Tensor],
    crosses: Mapping[str, torch.Tensor],
    *,
    strength: float,
    damping: float,
) -> dict[str, Linear]:
    """Return the projections with their targets in place of the weights.

    Args:
        sublayer: with the source's weights.
        hessians: by capture, of the quantized inputs, fp32 (k, k).
        crosses: by capture, from `cross_products`.
        strength: how far to go, 0 to 1.
        damping: added to a Hessian, in mean diagonals.
    """
    moves: dict[str, torch.Tensor] = {}
    for capture, hessian in hessians.items():
        damped = hessian.clone()
        mean = float(hessian.diagonal().mean())
        damped.diagonal().add_(max(damping * mean, LEAST_DAMPING))
        moves[capture] = strength * torch.linalg.solve(damped, crosses[capture])
    targets: dict[str, Linear] = {}
    for projection in sublayer.spec.projections:
        linear = sublayer.linears[projection.name]
        weight = linear.weight + linear.weight @ moves[projection.capture].T  # (n, k)
        targets[projection.name] = DenseLinear(weight, linear.bias)
    return targets


def output_error(sublayer: Sublayer, quantized: torch.Tensor, outputs: torch.Tensor) -> float:
    """Return the mean over rows of ‖y - y_source‖ / ‖y_source‖, with the linears as they are."""
    device = device_of(sublayer)
    errors = [
        float((sublayer(row[None].to(device))[0].cpu() - y).norm() / y.norm())
        for row, y in zip(quantized, outputs, strict=True)
    ]
    return sum(errors) / len(errors)


def _read(sublayer: Sublayer, state: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return capture name → what is read of a row (t, hidden), fp32 (t, k)."""
    normed = sublayer.normed(state[None].to(device_of(sublayer)))
    return {"input": normed[0], "inner": sublayer.inner(normed)[0]}
