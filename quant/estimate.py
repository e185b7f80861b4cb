"""Estimate what rounding each projection costs in nats, from its Fisher factors.

The second kind of measurement: no candidate is run through the model. Every projection, and the
head, is a slot of its own (`docs/concepts/quality.md`).
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from exl2flow.core.config import RoundingOptions
from exl2flow.core.errors import QuantizationError
from exl2flow.core.files import digest, read_json, write_json
from exl2flow.core.stage import StageRun
from exl2flow.core.store import StageFolder
from exl2flow.model import DenseLinear, ProjectionSpec, Sublayer
from exl2flow.model.exl2 import QuantParams
from exl2flow.quant.candidates import HEAD_OPTIONS, PROJECTION_OPTIONS, parse_params
from exl2flow.quant.divergence import divergence
from exl2flow.quant.fisher import Factors, estimate
from exl2flow.quant.gptq import RoundingJob, padded_weight, round_matrices
from exl2flow.quant.hessian import (
    HessianFactor,
    HessianSum,
    collect_hessians,
    factor,
    mixed,
    relative_error,
)
from exl2flow.quant.measurement import CandidateResult, projection_bits
from exl2flow.quant.sensitivity import read_factors
from exl2flow.quant.source import SourceModel, device_of
from exl2flow.quant.walk import OverSource, walk

HEAD_FILE = "sublayers/head.json"
HEAD_ROWS = 2  # rows on which the head's candidates are compared
HOPELESS_ERROR = 0.9  # a projection whose best candidate is above this cannot be quantized
REFERENCE = parse_params("3 g128")  # where the gain of rounding in the outputs' metric is measured


class Estimating(OverSource):
    """The work of `measure` at a sublayer when there are Fisher factors."""

    def __init__(self, folder: StageFolder, factors: Path, options: RoundingOptions) -> None:
        self.folder = folder
        self.factors = factors
        self.options = options

    def describe(self, path: Path) -> str:
        """See `SublayerWork`."""
        nats = [entry["nats"] for entries in read_json(path).values() for entry in entries]
        return f"nats={min(nats):.2g}..{max(nats):.2g}"

    def compute(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> str:
        """See `SublayerWork`: try all candidates, then let the states pass unquantized."""
        hessians, outputs = collect_hessians(sublayer, states)
        device = device_of(sublayer)
        factors = {
            name: item.to(device)
            for name, item in read_factors(self.factors, sublayer.spec.index).items()
        }
        results: dict[str, list[CandidateResult]] = {}
        for projection in sublayer.spec.projections:
            hessian = hessians[projection.capture]
            weight = padded_weight(sublayer.linears[projection.name])
            results[projection.key] = self._results(
                projection, weight, hessian, factors[projection.name]
            )
        for row, output in outputs.items():
            states[row] = output
        return _write(path, results)

    def _results(
        self,
        projection: ProjectionSpec,
        weight: torch.Tensor,
        hessian: torch.Tensor,
        factors: Factors,
    ) -> list[CandidateResult]:
        """Round a projection with every candidate and estimate the cost of each."""
        item = factor(
            mixed(hessian, factors.input, self.options.fisher_share),
            damping=self.options.damping,
            name=projection.key,
        )
        if item.remedy:
            self.folder.note(f"{projection.key}: {item.remedy}")
        rounded = self.rounded(weight, PROJECTION_OPTIONS, item)
        gain = self._gain(weight, item, factors)
        results = [
            CandidateResult(
                accuracy=max(0.0, 1 - relative_error(hessian, weight, matrix)),
                total_bits=projection_bits(projection, params),
                params={projection.name: params},
                nats=gain * estimate(matrix - weight, factors),
            )
            for params, matrix in rounded.items()
        ]
        best = min(1 - result.accuracy for result in results)
        if best > HOPELESS_ERROR:
            raise QuantizationError(
                f"the best candidate of `{projection.key}` has a relative error of {best:.3f}; "
                "the model or the calibration data is unusable: check both with `--dry-run`"
            )
        return results

    def rounded(
        self,
        weight: torch.Tensor,
        options: tuple[QuantParams, ...],
        item: HessianFactor,
        output: torch.Tensor | None = None,
    ) -> dict[QuantParams, torch.Tensor]:
        """Return parameters → dequantized matrix fp32 (k, n)."""
        jobs = [RoundingJob(weight=weight, params=params, output=output) for params in options]
        found = round_matrices(jobs, item, search=self.options.scale_search)
        return {job.params: r.dequantize().float() for job, r in zip(jobs, found, strict=True)}

    def _gain(self, weight: torch.Tensor, item: HessianFactor, factors: Factors) -> float:
        """Return by what part of its cost a projection is left when outputs are regarded, too."""
        if not self.options.rounds:
            return 1.0
        output = factors.output.damped(self.options.output_damping).blocks
        costs = [
            estimate(self.rounded(weight, (REFERENCE,), item, metric)[REFERENCE] - weight, factors)
            for metric in (output, None)
        ]
        return min(1.0, costs[0] / costs[1]) if costs[1] > 0 else 1.0


def estimate_options(options: RoundingOptions) -> dict[str, object]:
    """Return what of the options changes an estimate."""
    used = {"scale_search", "damping", "fisher_share", "output_damping"}
    return {**options.model_dump(include=used), "two_sided": options.rounds > 0}


def estimate_slots(run: StageRun, model: SourceModel, rows: torch.Tensor) -> dict[str, object]:
    """Return projection key → entries of `measurement.json`, the head's among them.

    Args:
        run: of the stage `measure`.
        model: the source.
        rows: int64 (rows, t).
    """
    folder = run.folder
    folder.manifest.total = len(model.spec.sublayers) + 1
    work = Estimating(folder, run.inputs["sensitivity"], run.config.rounding)
    states = walk(run, model, rows, work, to_end=not folder.valid(HEAD_FILE))
    if states is not None:
        sha256 = _write(folder.path / HEAD_FILE, {model.spec.head.key: _head(model, states, work)})
        folder.commit(HEAD_FILE, sha256, cursor=folder.manifest.total)
    run.tick(folder.manifest.total, folder.manifest.total, model.spec.head.key)
    run.tick(folder.manifest.total, folder.manifest.total, "lm_head")
    files = [*map(work.file, model.spec.sublayers), HEAD_FILE]
    return {key: value for name in files for key, value in read_json(folder.path / name).items()}


def _head(model: SourceModel, states: torch.Tensor, work: Estimating) -> list[CandidateResult]:
    """Measure the head's candidates on final states fp32 (rows, t, hidden)."""
    projection, head = model.spec.head, model.head()
    weight = padded_weight(head.linear)
    total = HessianSum(projection.in_features, device=model.device)
    for row in states:
        total.add(head.normed(row[None].to(model.device)))
    hessian = total.mean()
    factors = read_factors(work.factors, "head")[projection.name].to(model.device)
    item = factor(
        mixed(hessian, factors.input, work.options.fisher_share),
        damping=work.options.damping,
        name=projection.key,
    )
    if item.remedy:
        work.folder.note(f"{projection.key}: {item.remedy}")
    step = max(1, len(states) // HEAD_ROWS)
    chosen = states[::step][:HEAD_ROWS]
    inputs = torch.cat([head.normed(row[None].to(model.device))[0] for row in chosen])
    results = []
    for params in HEAD_OPTIONS:
        matrix = work.rounded(weight, (params,), item)[params]
        found = DenseLinear(
            matrix.T.contiguous(), head.linear.bias, out_features=len(head.linear.weight)
        )
        results.append(
            CandidateResult(
                accuracy=max(0.0, 1 - relative_error(hessian, weight, matrix)),
                total_bits=projection_bits(projection, params),
                params={projection.name: params},
                nats=divergence(head.linear, inputs, found, inputs),
            )
        )
    return results


def _write(path: Path, results: Mapping[str, list[CandidateResult]]) -> str:
    write_json(path, {key: [item.to_json() for item in items] for key, items in results.items()})
    return digest(path)
