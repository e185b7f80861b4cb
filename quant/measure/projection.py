"""The cost of rounding a single projection, from its Fisher factors."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from exl2flow.core.errors import QuantizationError
from exl2flow.core.options.config import RoundingOptions, ScaleSearch
from exl2flow.model import Linear, ProjectionSpec
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.measure.compact import bits_by_shape
from exl2flow.quant.measure.results import Results
from exl2flow.quant.rounding.error_feedback import (
    RoundedMatrix,
    RoundingJob,
    near,
    padded_weight,
    round_matrices,
)
from exl2flow.quant.rounding.hessian import HessianFactor, squared_norm
from exl2flow.quant.sensitivity.fisher import Factors, estimated_nats

HOPELESS_ERROR = 0.9  # a projection whose best candidate is above this cannot be quantized ...
NEGLIGIBLE_NATS = 1e-4  # ... unless the error costs less: weights near zero are rounded to it
LEAST_SIZE = 1e-30  # of a projection's output
REFERENCE = (3, 128)  # bits and group size at which the gain of the output metric is measured


class Projection:
    """A projection and the cost of rounding it."""

    def __init__(
        self,
        spec: ProjectionSpec,
        linear: Linear,
        hessian: torch.Tensor,
        item: HessianFactor,
        factors: Factors,
    ) -> None:
        self.spec, self.hessian, self.item = spec, hessian, item
        self.factors = factors.to(hessian.device)
        self.weight = padded_weight(linear)
        self.values = near(self.weight, linear)

    def rounded(
        self, options: Iterable[QuantParams], search: ScaleSearch, *, keep_fed_back: bool = False
    ) -> Iterator[RoundedMatrix]:
        """Yield the matrix rounded with each set of parameters."""
        jobs = [RoundingJob(weight=self.weight, params=params) for params in options]
        return round_matrices(jobs, self.item, search=search, keep_fed_back=keep_fed_back)

    def row_costs(
        self,
        options: Iterable[QuantParams],
        search: ScaleSearch,
        nats: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return nats and squared relative error of each row, for parameters of one width.

        Later rows cannot compensate the part of a row's error that feedback leaves: rows of
        `U⁻ᵀ E` are uncorrelated in the metric of the Hessian, so each has its own share of the
        objective.

        Args:
            options: the parameters.
            search: how scales are chosen.
            nats: cost of a matrix fp16 (k, n). None: the estimate from the factors.

        Returns:
            fp64 (options, 2, k), in act-order.
        """
        size = squared_norm(self.hessian, self.values).clamp(min=LEAST_SIZE)

        def cost(matrix: RoundedMatrix) -> torch.Tensor:
            assert matrix.fed_back is not None
            norms = [self.factors.output.row_norms(part) for part in matrix.fed_back.readings()]
            shares = torch.cat(norms).clamp(min=0).double()
            shares /= shares.sum().clamp(min=torch.finfo(torch.float64).tiny)
            rounded = matrix.dequantize()
            squared = squared_norm(self.hessian, rounded, less=self.values).clamp(min=0) / size
            price = self.nats(rounded) if nats is None else nats(rounded)
            return torch.stack([price, squared])[:, None].double() * shares

        # keep no matrix of a head while the next one is computed
        return torch.stack(list(map(cost, self.rounded(options, search, keep_fed_back=True))))

    def nats(self, rounded: torch.Tensor) -> torch.Tensor:
        """Return the estimated cost of a rounded matrix, (k, n)."""
        return estimated_nats(rounded, self.factors, less=self.values)


def results_of(
    projections: Sequence[Projection],
    costs: torch.Tensor,
    widths: Sequence[tuple[int, int]],
    options: Sequence[QuantParams],
    gains: torch.Tensor,
) -> dict[str, Results]:
    """Return the cost of every candidate, by projection key.

    Args:
        projections: which have `k` in-features.
        costs: fp64 (projections, widths, 2, k), as from `row_costs`.
        widths: bits and group size.
        options: the candidates; each band's rows cost what they do at its width.
        gains: factors by which the output metric reduces the nats, (projections,).

    Raises:
        QuantizationError: even the best one is unusable, and its error matters.
    """
    found = []
    for params in options:
        bands = [
            costs[:, widths.index((band.bits, band.group_size)), :, band.start : band.stop].sum(-1)
            for band in params.bands(costs.shape[-1])
        ]
        found.append(torch.stack(bands).sum(dim=0))
    nats, squared = torch.stack(found, dim=-1).unbind(1)  # fp64 (projections, options)
    nats = nats * gains.to(nats.device)[:, None]
    bits = bits_by_shape([p.spec for p in projections], options)
    rows = zip(projections, nats.tolist(), squared.tolist(), bits, strict=True)
    return {p.spec.key: _results(p.spec, options, *numbers) for p, *numbers in rows}


def _results(
    spec: ProjectionSpec,
    options: Sequence[QuantParams],
    nats: list[float],
    squared: list[float],
    bits: list[int],
) -> Results:
    accuracy = [max(0.0, 1 - squared_error**0.5) for squared_error in squared]
    best = 1 - max(accuracy)
    if best > HOPELESS_ERROR and not min(nats) < NEGLIGIBLE_NATS:
        raise QuantizationError(
            f"the best candidate of `{spec.key}` has a relative error of {best:.3f}; "
            "the model or the calibration data is unusable: check both with `--dry-run`"
        )
    return Results(
        candidates=tuple({spec.name: params} for params in options),
        bits=np.array(bits, np.int64),
        accuracy=np.array(accuracy),
        nats=np.array(nats),
    )


def reference_job(p: Projection, rounding: RoundingOptions) -> RoundingJob:
    """Return the job that rounds a projection with `REFERENCE` in its output metric."""
    output = p.factors.output.damped(rounding.output_damping).blocks
    params = QuantParams.uniform(*REFERENCE)
    return RoundingJob(weight=p.weight, params=params, output=output)
