"""Improve one stored matrix: refine it from its stored codes and from a new rounding.

Both keep bits, groups and permutation; the one with the lower objective is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from exl2flow.core.errors import SingularHessian
from exl2flow.core.options.config import RoundingOptions
from exl2flow.kernels import CHUNK_ELEMENTS, Group, times_output
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.rounding.descent import Metric, refine
from exl2flow.quant.rounding.error_feedback import RoundedMatrix, RoundingJob, round_matrices
from exl2flow.quant.rounding.hessian import (
    DampedHessian,
    HessianFactor,
    column_chunks,
    upper_factor,
)

STORED, ANEW = "stored", "rounded anew"  # starting points of refining
CLOSE = 1.25  # a stored matrix with more than this times the new one's refined loss never won


def params_of(groups: tuple[Group, ...]) -> QuantParams | None:
    """Return parameters that give exactly these groups, or None if there are none."""
    k = groups[-1].start + groups[-1].rows
    widths = tuple(dict.fromkeys(group.bits for group in groups))
    members = [[group for group in groups if group.bits == bits] for bits in widths]
    if widths != tuple(sorted(widths, reverse=True)):
        return None
    # counts are rounded up: half a group less gives the same count despite float rounding
    shares = [(sum(g.rows for g in same) - same[0].rows / 2) / k for same in members[:-1]]
    params = QuantParams(
        bit_widths=widths,
        proportions=(*shares, 1.0 - sum(shares)),
        group_sizes=tuple(same[0].rows for same in members),
    )
    return params if params.groups(k) == groups else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """The better of two refined matrices; losses are tr(O Eᵀ H E), before and for each."""

    matrix: RoundedMatrix
    start: str
    before: float
    losses: Mapping[str, float]


def improve(
    stored: RoundedMatrix,
    weight: torch.Tensor,
    item: HessianFactor,
    output: torch.Tensor | None,
    options: RoundingOptions,
) -> Improvement:
    """Refine a stored matrix, and one rounded anew with its layout; return the better one.

    Args:
        stored: the matrix in the model.
        weight: of the reference, as in a `RoundingJob`.
        item: factor of the Hessian, in any order.
        output: fp32 (blocks, b, b), metric of errors in one row, or None.
        options: of rounding.
    """
    in_order = replace(item.hessian, perm=stored.perm)
    metric = Metric(hessian=in_order.matrix(), output=output)
    before = loss(stored, weight, metric)
    refined: dict[str, RoundedMatrix] = {}
    losses: dict[str, float] = {}

    def try_from(name: str, start: RoundedMatrix) -> None:
        refined[name] = refine(start, weight, metric, rounds=options.rounds, sweeps=options.sweeps)
        losses[name] = loss(refined[name], weight, metric)

    anew = _rounded_anew(stored, weight, in_order, metric, options)
    if anew is not None:
        try_from(ANEW, anew)
    if not losses or before < CLOSE * losses[ANEW]:
        try_from(STORED, stored)
    best = min(losses, key=losses.__getitem__)
    return Improvement(matrix=refined[best], start=best, before=before, losses=losses)


def loss(rounded: RoundedMatrix, weight: torch.Tensor, metric: Metric) -> float:
    """Return tr(O Eᵀ H E) of a matrix; `weight` fp32 (k, n) in the order of the in-features."""
    size = 1 if metric.output is None else metric.output.shape[1]
    step = max(1, CHUNK_ELEMENTS // len(weight) // size) * size
    total = metric.hessian.new_zeros(())
    for columns, part in column_chunks(rounded.dequantize(), weight, step=step):
        error, output = part[rounded.perm], metric.output
        if output is not None:
            output = output[columns.start // size : columns.stop // size]
        total = total + (metric.hessian @ error).mul_(times_output(error, output)).sum()
    return float(total)


def _rounded_anew(
    stored: RoundedMatrix,
    weight: torch.Tensor,
    hessian: DampedHessian,
    metric: Metric,
    options: RoundingOptions,
) -> RoundedMatrix | None:
    """Round with the stored groups and permutation; None if no parameters describe them."""
    params = params_of(stored.groups)
    if params is None:
        return None
    try:
        upper = upper_factor(metric.hessian.flip(0, 1))
    except SingularHessian:
        return None
    job = RoundingJob(weight=weight, params=params, output=metric.output)
    item = HessianFactor(hessian=hessian, upper=upper)
    (rounded,) = round_matrices([job], item, search=options.scale_search)
    return rounded
