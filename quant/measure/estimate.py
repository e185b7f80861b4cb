"""Estimate the cost in nats of rounding each projection, from its Fisher factors.

No candidate is run through the model. Every projection, and the head, is a slot. Only matrices of
a single width are rounded; a mixed one costs the sum of its rows' costs at their widths
(`docs/concepts/quality.md`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from exl2flow.core.errors import QuantizationError
from exl2flow.core.options.config import RoundingOptions, RunOptions, ScaleSearch
from exl2flow.core.store.stage import StageRun
from exl2flow.core.store.store import StageFolder
from exl2flow.kernels import run_concurrently
from exl2flow.model import DenseLinear, Linear, ProjectionSpec, Sublayer
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.measure.candidates import HEAD_OPTIONS, PROJECTION_OPTIONS, single_widths
from exl2flow.quant.measure.compact import is_compact, read_numbers, write_results
from exl2flow.quant.measure.measurement import CandidateResult, projection_bits
from exl2flow.quant.rounding.coverage import Coverage
from exl2flow.quant.rounding.error_feedback import (
    RoundedMatrix,
    RoundingJob,
    near,
    padded_weight,
    round_matrices,
)
from exl2flow.quant.rounding.hessian import (
    HessianFactor,
    collect_hessians,
    head_hessian,
    squared_norm,
    widest_first,
)
from exl2flow.quant.sensitivity.fisher import Factors, estimated_nats, shared_factor
from exl2flow.quant.sensitivity.stage import FactorFiles
from exl2flow.quant.walk.divergence import divergence
from exl2flow.quant.walk.pinned import made_to_fit
from exl2flow.quant.walk.source_model import SourceModel, device_of
from exl2flow.quant.walk.walk import Store, SublayerWork, walk

HEAD_FILE = "sublayers/head.json"
HEAD_ROWS = 2  # rows on which the head's candidates are compared
HOPELESS_ERROR = 0.9  # a projection whose best candidate is above this cannot be quantized
LEAST_SIZE = 1e-30  # of a projection's output
REFERENCE = (3, 128)  # bits and group size at which the gain of the output metric is measured


class Estimating(SublayerWork):
    """The work of `measure` at a sublayer when there are Fisher factors."""

    def __init__(
        self,
        folder: StageFolder,
        factors: FactorFiles,
        options: RoundingOptions,
        *,
        compact: bool = False,
    ) -> None:
        self.folder = folder
        self.factors = factors
        self.options = options
        self.compact = compact

    def describe(self, path: Path) -> str:
        """See `SublayerWork`."""
        nats = read_numbers(path, "nats")
        return f"nats={min(nats):.2g}..{max(nats):.2g}"

    def compute(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> Store:
        """See `SublayerWork`: advance the states unquantized, and try all candidates."""
        coverage = Coverage.of(sublayer, states, self.options.expert_tokens)
        hessians, _ = collect_hessians(sublayer, states, move=True, coverage=coverage)
        factors = self.factors.read(sublayer.spec.index)
        reading, note = sublayer.spec.reading, self.folder.note

        def factor(capture: str) -> HessianFactor:
            first, hessian = reading(capture)[0], hessians[capture]
            return shared_factor(first, hessian, factors, self.options, note=note)

        # experts are rounded one by one, so that memory does not grow with their number
        items = {} if sublayer.spec.group else {capture: factor(capture) for capture in hessians}

        def work(capture: str) -> dict[str, list[CandidateResult]]:
            hessian, item = hessians[capture], items.get(capture) or factor(capture)
            projections = [
                Projection(spec, sublayer.linears[spec.name], hessian, item, factors[spec.name])
                for spec in reading(capture)
            ]
            return estimated(projections, PROJECTION_OPTIONS, self.options)

        works = [partial(work, capture) for capture in widest_first(hessians)]
        results: dict[str, list[CandidateResult]] = {}
        for by_key in run_concurrently(works, device_of(sublayer)):
            results |= by_key
        in_order = {p.key: results[p.key] for p in sublayer.spec.projections}
        return partial(write_results, path, in_order, compact=self.compact)


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

    def results(
        self,
        options: Sequence[QuantParams],
        costs: Mapping[tuple[int, int], torch.Tensor],
        gain: float,
    ) -> list[CandidateResult]:
        """Return the cost of every candidate.

        Args:
            options: the candidates.
            costs: bits and group size → fp64 (2, k), as from `row_costs`.
            gain: factor by which the output metric reduces the nats.

        Raises:
            QuantizationError: even the best one is unusable.
        """
        results = []
        for params in options:
            bands = [  # each band's rows cost what they do at its width
                costs[band.bits, band.group_size][:, band.start : band.stop].sum(dim=1)
                for band in params.bands(self.spec.in_features)
            ]
            nats, squared_error = torch.stack(bands).sum(dim=0).tolist()
            result = CandidateResult(
                accuracy=max(0.0, 1 - squared_error**0.5),
                total_bits=projection_bits(self.spec, params),
                params={self.spec.name: params},
                nats=gain * nats,
            )
            results.append(result)
        best = 1 - max(result.accuracy for result in results)
        if best > HOPELESS_ERROR:
            raise QuantizationError(
                f"the best candidate of `{self.spec.key}` has a relative error of {best:.3f}; "
                "the model or the calibration data is unusable: check both with `--dry-run`"
            )
        return results


def estimated(
    projections: Sequence[Projection],
    options: Sequence[QuantParams],
    rounding: RoundingOptions,
    nats: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> dict[str, list[CandidateResult]]:
    """Price all candidates of the projections that read one activation, by projection key.

    Args:
        projections: the projections to round.
        options: the candidates.
        rounding: options of rounding.
        nats: cost of a matrix fp16 (k, n). None: the estimate from the factors, reduced by the gain
            of the output metric.
    """
    bands = single_widths(options)
    params = [QuantParams.uniform(*band) for band in bands]
    costs = [p.row_costs(params, rounding.scale_search, nats) for p in projections]
    gains = torch.ones(len(projections))
    if nats is None and rounding.rounds:
        without = torch.stack([cost[bands.index(REFERENCE), 0].sum() for cost in costs])
        gains = (_with_metric(projections, rounding) / without).clamp(max=1).nan_to_num(nan=1)
    return {
        projection.spec.key: projection.results(
            options, dict(zip(bands, cost.cpu(), strict=True)), gain
        )
        for projection, cost, gain in zip(projections, costs, gains.tolist(), strict=True)
    }


def _with_metric(projections: Sequence[Projection], rounding: RoundingOptions) -> torch.Tensor:
    """Return the cost of `REFERENCE` when rounding in the output metric, (projections,)."""
    jobs = [
        RoundingJob(
            weight=p.weight,
            params=QuantParams.uniform(*REFERENCE),
            output=p.factors.output.damped(rounding.output_damping).blocks,
        )
        for p in projections
    ]
    rounded = round_matrices(jobs, projections[0].item, search=rounding.scale_search)
    pairs = zip(projections, rounded, strict=True)
    return torch.stack([p.nats(matrix.dequantize()) for p, matrix in pairs])


def estimate_options(options: RoundingOptions) -> dict[str, object]:
    """Return the options that an estimate depends on."""
    used = {"scale_search", "damping", "fisher_share", "output_damping", "expert_tokens"}
    known = {name: value for name, value in options.fingerprinted().items() if name in used}
    return {**known, "two_sided": options.rounds > 0}


def estimate_all(run: StageRun[RunOptions], model: SourceModel, rows: torch.Tensor) -> list[str]:
    """Measure all projections and the head; return the files that list them, in order.

    Args:
        run: the stage `measure`.
        model: the source.
        rows: int64 (rows, t).
    """
    folder = run.folder
    folder.manifest.total = len(model.spec.sublayers) + 1
    factors = FactorFiles(run.inputs["sensitivity"], model.device)
    compact = is_compact(len(model.spec.projections) + 1)
    work = Estimating(folder, factors, run.config.rounding, compact=compact)
    states = walk(run, model, rows, work, to_end=not folder.valid(HEAD_FILE))
    if states is not None:
        results = made_to_fit(partial(_head, model, states, work))
        by_key = {model.spec.head.key: results}
        sha256 = write_results(folder.path / HEAD_FILE, by_key, compact=compact)
        folder.commit(HEAD_FILE, sha256, cursor=folder.manifest.total)
    run.tick(folder.manifest.total, folder.manifest.total, "lm_head")
    return [*map(work.file, model.spec.sublayers), HEAD_FILE]


def _head(model: SourceModel, states: torch.Tensor, work: Estimating) -> list[CandidateResult]:
    """Measure the head's candidates on final states fp32 (rows, t, hidden)."""
    spec, head = model.spec.head, model.head()
    factors = work.factors.read("head")
    step = max(1, len(states) // HEAD_ROWS)
    chosen = states[::step][:HEAD_ROWS]
    inputs = torch.cat([head.normed(row[None].to(model.device))[0] for row in chosen])

    def nats(matrix: torch.Tensor) -> torch.Tensor:
        columns = len(head.linear.weight)
        weight = matrix.T.to(head.linear.weight.dtype)
        rounded = head.with_linear(DenseLinear(weight, head.linear.bias, out_features=columns))
        return torch.tensor(divergence(head, inputs, rounded, inputs), device=matrix.device)

    hessian = head_hessian(head, states)
    item = shared_factor(spec, hessian, factors, work.options, note=work.folder.note)
    projection = Projection(spec, head.linear, hessian, item, factors[spec.name])
    return estimated([projection], HEAD_OPTIONS, work.options, nats)[spec.key]
