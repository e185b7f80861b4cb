"""Measure what each candidate of each sublayer costs in bits and in error.

States are those of the unquantized model throughout: errors do not accumulate here. The result is
`measurement.json` in the schema of exllamav2, with an `exl2flow` entry beside it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from exl2flow.core.config import ConversionConfig
from exl2flow.core.errors import QuantizationError
from exl2flow.core.files import digest, read_json, write_json
from exl2flow.core.stage import Stage, StageRun
from exl2flow.core.store import StageFolder, versions
from exl2flow.model import DenseLinear, Linear, Sublayer, SublayerSpec
from exl2flow.model.exl2 import QuantParams, padded_columns
from exl2flow.quant.candidates import Candidate, candidates_for
from exl2flow.quant.gptq import RoundedMatrix, RoundingJob, round_matrices
from exl2flow.quant.hessian import HessianFactor, HessianSum, factor
from exl2flow.quant.source import SourceModel, check_states, device_of
from exl2flow.quant.tokens import load_rows
from exl2flow.quant.walk import walk

LEAST_ACCURACY = 1e-6  # stored accuracies are cut off here
HOPELESS_ACCURACY = 0.1  # a sublayer whose best candidate is below this cannot be quantized
MEASUREMENT_FILE = "measurement.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateResult:
    """accuracy: 1 - mean relative error of the output; total_bits: of all projections."""

    accuracy: float
    total_bits: int
    params: Candidate

    def to_json(self) -> dict[str, object]:
        """Return the entry of `measurement.json`."""
        params = {name: value.to_json() for name, value in self.params.items()}
        return {"accuracy": self.accuracy, "total_bits": self.total_bits, **params}

    @classmethod
    def from_json(cls, entry: Mapping[str, object]) -> "CandidateResult":
        """Read an entry, also one that exllamav2 wrote."""
        params = {k: QuantParams.from_json(v) for k, v in entry.items() if isinstance(v, dict)}
        return cls(
            accuracy=float(entry["accuracy"]),  # type: ignore[arg-type]  # JSON
            total_bits=int(entry["total_bits"]),  # type: ignore[call-overload]  # JSON
            params=params,
        )


def candidate_bits(sublayer: SublayerSpec, candidate: Candidate) -> int:
    """Return all stored bits of a sublayer under a candidate."""
    return sum(
        candidate[p.name].total_bits(
            p.in_features, padded_columns(p.out_features), has_bias=p.has_bias
        )
        for p in sublayer.projections
    )


def collect_hessians(
    sublayer: Sublayer, states: torch.Tensor, *, keep: range | None = None
) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
    """Run every row through the unquantized sublayer.

    Args:
        sublayer: with its own weights.
        states: fp32 (rows, t, hidden), not changed.
        keep: rows whose outputs are wanted; all when None.

    Returns:
        Capture name → Hessian fp32 (k, k), and row → output fp32 (t, hidden).
    """
    sums: dict[str, HessianSum] = {}
    outputs: dict[int, torch.Tensor] = {}
    for row in range(len(states)):
        hidden = states[row : row + 1].to(device_of(sublayer))
        normed = sublayer.normed(hidden)
        inner = sublayer.inner(normed)
        for capture, x in (("input", normed), ("inner", inner)):
            if capture not in sums:
                sums[capture] = HessianSum(x.shape[-1], device=x.device)
            sums[capture].add(x)
        if keep is None or row in keep:
            outputs[row] = sublayer.output(hidden, inner)[0].cpu()
            check_states(outputs[row], where=sublayer.spec.name, row=row)
    return {capture: total.mean() for capture, total in sums.items()}, outputs


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """Add zeros at the end of the last axis, out-features, up to the stored width."""
    missing = padded_columns(tensor.shape[-1]) - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing))


def padded_weight(linear: Linear) -> torch.Tensor:
    """Return a projection's matrix fp32 (k, n) with zero columns up to the stored width."""
    return padded(linear.weight.T.float()).contiguous()


class Measuring:
    """The work of `measure` at a sublayer."""

    def __init__(self, folder: StageFolder) -> None:
        self.folder = folder

    def file(self, sublayer: SublayerSpec) -> str:
        """See `SublayerWork`."""
        return f"sublayers/{sublayer.index:04d}.json"

    def restore(self, sublayer: Sublayer, path: Path) -> None:
        """See `SublayerWork`: reference states need no results."""

    def describe(self, path: Path) -> str:
        """See `SublayerWork`."""
        accuracies = [entry["accuracy"] for entry in read_json(path)]
        return f"rel_err={1 - max(accuracies):.4f}..{1 - min(accuracies):.4f}"

    def compute(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> str:
        """See `SublayerWork`: try all candidates, then let the states pass unquantized."""
        hessians, outputs = collect_hessians(sublayer, states)
        factors = {
            capture: factor(hessian, name=f"{sublayer.spec.name}.{capture}")
            for capture, hessian in hessians.items()
        }
        for capture, item in factors.items():
            if item.remedy:
                self.folder.note(f"{sublayer.spec.name} {capture}: {item.remedy}")
        targets = torch.stack([outputs[row] for row in range(len(states))])
        candidates = candidates_for(sublayer.spec)
        errors = _candidate_errors(sublayer, states, targets, candidates, factors)
        results = [
            CandidateResult(
                accuracy=max(LEAST_ACCURACY, 1 - error),
                total_bits=candidate_bits(sublayer.spec, candidate),
                params=candidate,
            )
            for candidate, error in zip(candidates, errors, strict=True)
        ]
        best = max(result.accuracy for result in results)
        if best < HOPELESS_ACCURACY:
            raise QuantizationError(
                f"the best candidate of `{sublayer.spec.name}` reaches accuracy {best:.3f} only; "
                "the model or the calibration data is unusable: check both with `--dry-run`"
            )
        states.copy_(targets)
        write_json(path, [result.to_json() for result in results])
        return digest(path)


def _candidate_errors(
    sublayer: Sublayer,
    states: torch.Tensor,
    targets: torch.Tensor,
    candidates: tuple[Candidate, ...],
    factors: Mapping[str, HessianFactor],
) -> list[float]:
    """Return each candidate's mean over rows of ‖y - y_ref‖ / ‖y_ref‖."""
    rounded = _round_variants(sublayer, candidates, factors)
    first = [p.name for p in sublayer.spec.projections if p.capture == "input"]
    last = [p.name for p in sublayer.spec.projections if p.capture == "inner"]
    totals = [0.0] * len(candidates)
    sharing: dict[tuple[QuantParams, ...], list[int]] = {}
    for index, candidate in enumerate(candidates):
        sharing.setdefault(tuple(candidate[name] for name in first), []).append(index)
    for members in sharing.values():
        inputs = [_linear(sublayer, name, candidates[members[0]], rounded) for name in first]
        sublayer.linears.update(zip(first, inputs, strict=True))
        outputs = {i: [_linear(sublayer, n, candidates[i], rounded) for n in last] for i in members}
        for row, target in enumerate(targets):
            hidden = states[row : row + 1].to(device_of(sublayer))
            inner = sublayer.inner(sublayer.normed(hidden))
            for index, linears in outputs.items():
                sublayer.linears.update(zip(last, linears, strict=True))
                difference = sublayer.output(hidden, inner)[0].cpu() - target
                totals[index] += float(difference.norm() / target.norm())
    return [total / len(states) for total in totals]


Variants = dict[tuple[str, QuantParams], RoundedMatrix]


def _round_variants(
    sublayer: Sublayer, candidates: tuple[Candidate, ...], factors: Mapping[str, HessianFactor]
) -> Variants:
    """Round every distinct (projection, parameters) once, those sharing a Hessian together."""
    variants: Variants = {}
    for capture, item in factors.items():
        names = [p.name for p in sublayer.spec.projections if p.capture == capture]
        keys = list(dict.fromkeys((name, c[name]) for name in names for c in candidates))
        weights = {name: padded_weight(sublayer.linears[name]) for name in names}
        jobs = [RoundingJob(weight=weights[name], params=params) for name, params in keys]
        variants |= dict(zip(keys, round_matrices(jobs, item), strict=True))
    return variants


def _linear(sublayer: Sublayer, name: str, candidate: Candidate, rounded: Variants) -> DenseLinear:
    """Return a projection with the weights that a decoder will see."""
    original = sublayer.linears[name]
    matrix = rounded[name, candidate[name]].dequantize()[:, : len(original.weight)]
    return DenseLinear(matrix.T.float().contiguous(), original.bias)


@torch.inference_mode()
def measure(run: StageRun) -> None:
    """Write `measurement.json` of the source model into the stage folder."""
    model = SourceModel.open(run.config, run.device)
    run.folder.manifest.total = len(model.spec.sublayers)
    work = Measuring(run.folder)
    walk(run, model, load_rows(run.inputs["tokenize"], "measure"), work, to_end=False)
    entries: dict[str, object] = {
        sublayer.name: read_json(run.folder.path / work.file(sublayer))
        for sublayer in model.spec.sublayers
    }
    measurement = {
        "measurement": {**entries, "model.norm.norm": None, "lm_head.linear": None},
        "last_module_idx": len(model.spec.sublayers) + 2,  # embedding, sublayers, norm, head
        "exl2flow": {
            "fingerprint": run.folder.manifest.fingerprint,
            "versions": versions(),
            "options": json.loads(run.config.calibration.model_dump_json()),
            "notes": run.folder.manifest.notes,
        },
    }
    path = run.folder.path / MEASUREMENT_FILE
    write_json(path, measurement)
    run.folder.commit(MEASUREMENT_FILE, digest(path))


def _options(config: ConversionConfig) -> dict[str, object]:
    return {"rope": config.rope.model_dump()}


MEASURE = Stage(
    name="measure",
    schema=1,
    inputs=("tokenize",),
    options=_options,
    run=measure,
    enabled=lambda config: config.measurement is None,
)
