"""Estimate the cost in nats of rounding each projection, from its Fisher factors.

No candidate is run through the model. Every projection, and the head, is a slot. Only matrices of
a single width are rounded; a mixed one costs the sum of its rows' costs at their widths
(`docs/concepts/quality.md`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from exl2flow.core.options.config import RoundingOptions, RunOptions
from exl2flow.core.store.stage import StageRun
from exl2flow.core.store.store import StageFolder
from exl2flow.kernels import run_concurrently
from exl2flow.model import DenseLinear, ProjectionSpec, Sublayer, SublayerSpec
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.measure.candidates import HEAD_OPTIONS, PROJECTION_OPTIONS, single_widths
from exl2flow.quant.measure.compact import is_compact, read_numbers, write_results
from exl2flow.quant.measure.projection import REFERENCE, Projection, reference_job, results_of
from exl2flow.quant.measure.results import Results
from exl2flow.quant.measure.together import estimated_together
from exl2flow.quant.rounding.coverage import Coverage
from exl2flow.quant.rounding.error_feedback import round_matrices
from exl2flow.quant.rounding.hessian import (
    HessianFactor,
    collect_hessians,
    head_hessian,
)
from exl2flow.quant.rounding.together import factored_apart, runs_together
from exl2flow.quant.sensitivity.fisher import shared_factor, shared_factors
from exl2flow.quant.sensitivity.stage import FactorFiles
from exl2flow.quant.walk.divergence import divergence
from exl2flow.quant.walk.pinned import made_to_fit
from exl2flow.quant.walk.source_model import SourceModel, device_of
from exl2flow.quant.walk.walk import Store, SublayerWork, walk

HEAD_FILE = "sublayers/head.json"
HEAD_ROWS = 2  # rows on which the head's candidates are compared


@dataclass(frozen=True, kw_only=True)
class Estimating(SublayerWork):
    """The work of `measure` at a sublayer when there are Fisher factors."""

    folder: StageFolder
    factors: FactorFiles
    options: RoundingOptions
    compact: bool

    def describe(self, path: Path) -> str:
        """See `SublayerWork`."""
        nats = read_numbers(path, "nats")
        return f"nats={min(nats):.2g}..{max(nats):.2g}"

    def compute(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> Store:
        """See `SublayerWork`: advance the states unquantized, and try all candidates."""
        coverage = Coverage.of(sublayer, states, self.options.expert_tokens)
        hessians, _ = collect_hessians(sublayer, states, move=True, coverage=coverage)
        factors = self.factors.read(sublayer.spec.index)
        spec, note = sublayer.spec, self.folder.note
        copies = len(single_widths(PROJECTION_OPTIONS))
        runs = runs_together(spec, spec.widest_first, device_of(sublayer), copies=copies)
        largest = max(runs, key=lambda run: _weights(spec, run))

        def factored(run: Sequence[str]) -> list[HessianFactor]:
            firsts = [spec.reading(capture)[0] for capture in run]
            own = [hessians[capture] for capture in run]
            return shared_factors(firsts, own, factors, self.options, note=note)

        def work(run: Sequence[str], found: Sequence[HessianFactor]) -> dict[str, Results]:
            experts = [
                [
                    Projection(
                        p, sublayer.linears[p.name], hessians[capture], item, factors[p.name]
                    )
                    for p in spec.reading(capture)
                ]
                for capture, item in zip(run, found, strict=True)
            ]
            if len(experts) > 1:
                return estimated_together(experts, PROJECTION_OPTIONS, self.options)
            gain_first = len(runs) > 1 and run is largest
            return estimated(experts[0], PROJECTION_OPTIONS, self.options, gain_first=gain_first)

        results: dict[str, Results] = {}
        for some in factored_apart(spec, runs):
            works = [partial(work, run, factored(run)) for run in some]
            for by_key in run_concurrently(works, device_of(sublayer)):
                results |= by_key
        in_order = {p.key: results[p.key] for p in sublayer.spec.projections}
        return partial(write_results, path, in_order, compact=self.compact)


def _weights(spec: SublayerSpec, captures: Sequence[str]) -> int:
    return sum(p.numel for capture in captures for p in spec.reading(capture))


def estimated(
    projections: Sequence[Projection],
    options: Sequence[QuantParams],
    rounding: RoundingOptions,
    nats: Callable[[torch.Tensor], torch.Tensor] | None = None,
    *,
    gain_first: bool = False,
) -> dict[str, Results]:
    """Price all candidates of the projections that read one activation, by projection key.

    Args:
        projections: the projections to round.
        options: the candidates.
        rounding: options of rounding.
        nats: cost of a matrix fp16 (k, n). None: the estimate from the factors, reduced by the gain
            of the output metric.
        gain_first: whether to round in the output metric before all else. That leaves a GPU almost
            empty, so of what runs concurrently only one should be there at a time.
    """
    has_gain = nats is None and rounding.rounds > 0
    reduced = _with_metric(projections, rounding) if has_gain and gain_first else None
    bands = single_widths(options)
    params = [QuantParams.uniform(*band) for band in bands]
    costs = [p.row_costs(params, rounding.scale_search, nats) for p in projections]
    gains = torch.ones(len(projections))
    if has_gain:
        reduced = _with_metric(projections, rounding) if reduced is None else reduced
        without = torch.stack([cost[bands.index(REFERENCE), 0].sum() for cost in costs])
        gains = (reduced / without).clamp(max=1).nan_to_num(nan=1)
    return results_of(projections, torch.stack(costs).cpu(), bands, options, gains)


def _with_metric(projections: Sequence[Projection], rounding: RoundingOptions) -> torch.Tensor:
    """Return the cost of `REFERENCE` when rounding in the output metric, (projections,)."""
    jobs = [reference_job(p, rounding) for p in projections]
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
    folder, order = run.folder, model.spec.sublayers
    folder.manifest.total = len(order) + 1
    factors = FactorFiles(run.inputs["sensitivity"], model.device)
    compact = is_compact(len(model.spec.projections) + 1)
    work = Estimating(folder=folder, factors=factors, options=run.config.rounding, compact=compact)
    files = [*map(work.file, order), HEAD_FILE]
    parts = [*(sublayer.projections for sublayer in order), (model.spec.head,)]
    own = own_places(run, files, parts)
    factors.order = ["head" if place == len(order) else place for place in own]
    states = walk(run, model, rows, work, to_end=len(order) in own, own=own)
    if states is not None:
        results = made_to_fit(partial(_head, model, states, work))
        by_key = {model.spec.head.key: results}
        sha256 = write_results(folder.path / HEAD_FILE, by_key, compact=compact)
        folder.commit(HEAD_FILE, sha256, counts=True)
    run.tick(folder.manifest.total, folder.manifest.total, "lm_head")
    return files


def own_places(
    run: StageRun[RunOptions], files: Sequence[str], parts: Sequence[Sequence[ProjectionSpec]]
) -> list[int]:
    """Return the indexes of the missing files that this rank makes.

    Args:
        run: the stage.
        files: of its results.
        parts: the projections that each is about.
    """
    left = [place for place, file in enumerate(files) if not run.folder.valid(file)]
    costs = [float(sum(p.in_features * p.numel for p in parts[place])) for place in left]
    owners = run.ranks.owners(costs)
    return [place for place, owner in zip(left, owners, strict=True) if owner == run.ranks.rank]


def _head(model: SourceModel, states: torch.Tensor, work: Estimating) -> Results:
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
