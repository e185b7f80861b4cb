"""Estimates of experts whose matrices are rounded side by side; see `quant/measure/estimate.py`."""

from collections.abc import Sequence
from itertools import chain

import torch

from exl2flow.core.options.config import RoundingOptions, ScaleSearch
from exl2flow.core.runtime.interrupt import look
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.measure.candidates import single_widths
from exl2flow.quant.measure.projection import (
    LEAST_SIZE,
    REFERENCE,
    Projection,
    reference_job,
    results_of,
)
from exl2flow.quant.measure.results import Results
from exl2flow.quant.rounding.error_feedback import RoundingJob, rounded_values
from exl2flow.quant.rounding.hessian import squared_norm
from exl2flow.quant.rounding.together import batches

Expert = Sequence[Projection]  # projections that read one activation


def estimated_together(
    experts: Sequence[Expert], options: Sequence[QuantParams], rounding: RoundingOptions
) -> dict[str, Results]:
    """Price all candidates of experts, by projection key, as `estimated` does one by one.

    Args:
        experts: projections of one shape, equally many of each expert.
        options: the candidates.
        rounding: options of rounding.
    """
    widths = single_widths(options)
    params = [QuantParams.uniform(*width) for width in widths]
    elements = sum(p.values.numel() for p in experts[0])
    costs = torch.cat(
        [
            _row_costs(batch, params, rounding.scale_search)
            for batch in batches(experts, elements * len(params))
        ]
    )
    projections = list(chain.from_iterable(experts))
    gains = torch.ones(len(projections))
    if rounding.rounds:
        without = costs[:, widths.index(REFERENCE), 0].sum(dim=1)
        gains = (_with_metric(experts, rounding) / without).clamp(max=1).nan_to_num(nan=1)
    return results_of(projections, costs, widths, options, gains)


def _row_costs(
    experts: Sequence[Expert], params: Sequence[QuantParams], search: ScaleSearch
) -> torch.Tensor:
    """Return `Projection.row_costs` of all projections, fp64 (projections, params, 2, k)."""
    jobs = [
        RoundingJob(weight=p.weight, params=each)
        for p in chain.from_iterable(experts)
        for each in params
    ]
    items = [expert[0].item for expert in experts]
    values, fed_back = rounded_values(jobs, items, search=search)
    costs, begin = [], 0
    for expert in experts:
        metric = _Metric(expert[0])
        for p in expert:
            look()
            own = slice(begin, begin + len(params))
            price, squared = metric.costs(p, values[:, own])
            left = fed_back[:, own].to(values.device).reshape(-1, values.shape[2])
            norms = p.factors.output.row_norms(left)
            shares = norms.view(len(values), -1).T.clamp(min=0).double()
            least = torch.finfo(torch.float64).tiny
            shares /= shares.sum(dim=1, keepdim=True).clamp(min=least)
            costs.append(torch.stack([price, squared], dim=1)[:, :, None] * shares[:, None])
            begin = own.stop
    return torch.stack(costs)


def _with_metric(experts: Sequence[Expert], rounding: RoundingOptions) -> torch.Tensor:
    """Return the cost of `REFERENCE` when rounding in the output metric, fp64 (projections,)."""
    jobs = [reference_job(p, rounding) for p in chain.from_iterable(experts)]
    items = [expert[0].item for expert in experts]
    values, _ = rounded_values(jobs, items, search=rounding.scale_search)
    costs, begin = [], 0
    for expert in experts:
        metric = _Metric(expert[0])
        for p in expert:
            costs.append(metric.costs(p, values[:, begin : begin + 1])[0])
            begin += 1
    return torch.cat(costs)


class _Metric:
    """The Hessian of an expert's activation and its input factor, in act-order."""

    def __init__(self, first: Projection) -> None:
        self.perm = first.item.perm
        self.hessian, self.input = (
            matrix[self.perm][:, self.perm] for matrix in (first.hessian, first.factors.input)
        )

    def costs(self, p: Projection, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return nats and squared relative error of matrices fp16 (k, j, n), fp64 (j,)."""
        k, j, n = values.shape
        weight = p.values[self.perm].float()
        size = squared_norm(self.hessian, weight).clamp(min=LEAST_SIZE)
        error = values.float() - weight[:, None]
        flat = error.view(k, j * n)

        def total(product: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return product.view(k, j, n).mul_(other).sum(dim=(0, 2)).double()

        squared = total(self.hessian @ flat, error).clamp(min=0) / size
        pushed = p.factors.output.apply(error)
        return total(self.input @ flat, pushed) / 2, squared
