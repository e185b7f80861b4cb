"""Quantize every sublayer with its chosen candidate, then the head.

States are those of the quantized model: each sublayer is rounded for what the sublayers before it
really put out. One file per sublayer holds the stored tensors; its header holds the errors and the
digest of every reconstruction, which `compile` compares with what it wrote.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from exl2flow.core.config import ConversionConfig
from exl2flow.core.errors import ReconstructionMismatch
from exl2flow.core.files import read_metadata, read_tensors, tensor_bytes, write_tensors
from exl2flow.core.stage import Stage, StageRun
from exl2flow.kernels import tensor_cores
from exl2flow.model import (
    Exl2Linear,
    Linear,
    ModelSpec,
    ProjectionSpec,
    Sublayer,
    SublayerSpec,
)
from exl2flow.model.exl2 import QuantizedMatrix, padded_columns
from exl2flow.quant.allocate import read_choice
from exl2flow.quant.correction import Correction, CrossProducts, paired_rows
from exl2flow.quant.fisher import Factors, estimate
from exl2flow.quant.gptq import (
    RoundedMatrix,
    RoundingJob,
    alike,
    padded,
    padded_weight,
    round_matrices,
    side_by_side,
)
from exl2flow.quant.hessian import (
    collect_hessians,
    factor,
    head_hessian,
    mixed,
    relative_error,
)
from exl2flow.quant.layout import Choice
from exl2flow.quant.refine import Metric, refine_together
from exl2flow.quant.sensitivity import read_factors
from exl2flow.quant.source import DTYPE, SourceModel, device_of
from exl2flow.quant.tokens import load_rows
from exl2flow.quant.walk import advance, walk

log = logging.getLogger(__name__)

HEAD_FILE = "sublayers/head.safetensors"
ERROR_ROWS = 16  # rows whose unquantized outputs are kept to report a sublayer's error
FEEDBACK_LIMIT = 10**9  # heads with more weights are rounded to nearest, as exllamav2 does


def sublayer_file(sublayer: SublayerSpec) -> str:
    """Return the name of a sublayer's tensors inside the stage folder of `quantize`."""
    return f"sublayers/{sublayer.index:04d}.{sublayer.kind}.safetensors"


def result_files(spec: ModelSpec) -> list[str]:
    """Return the files of a finished `quantize` stage, in model order."""
    return [*map(sublayer_file, spec.sublayers), HEAD_FILE]


def read_report(path: Path) -> dict[str, object]:
    """Return what is known of a quantized sublayer: errors, parameters, reconstruction digests."""
    report: dict[str, object] = json.loads(read_metadata(path)["report"])
    return report


def reconstruction_digest(matrix: torch.Tensor) -> str:
    """Return the sha256 of a dequantized matrix, fp16 (k, n)."""
    return hashlib.sha256(tensor_bytes(matrix)).hexdigest()


def quantize_projection(
    projection: ProjectionSpec,
    linear: Linear,
    rounded: RoundedMatrix,
    hessian: torch.Tensor,
    factors: Factors | None = None,
) -> tuple[QuantizedMatrix, dict[str, object]]:
    """Pack a rounded matrix, check that it decodes to the same values, and report on it.

    Args:
        projection: what the matrix belongs to.
        linear: the weights before rounding.
        rounded: what became of them.
        hessian: of what the projection reads, fp32 (k, k).
        factors: price the error; without them `nats` is None.

    Raises:
        ReconstructionMismatch: the packed tensors decode to something else.
    """
    bias = None if linear.bias is None else padded(linear.bias)
    packed = rounded.pack(bias)
    matrix = rounded.dequantize()
    if not torch.equal(packed.dequantize(), matrix):
        raise ReconstructionMismatch(
            f"the packed tensors of `{projection.key}` do not decode to the rounded matrix; "
            "this is a defect of exl2flow: report it with the model's name"
        )
    weight = padded_weight(linear)
    error = matrix.float() - weight
    report: dict[str, object] = {
        "rel_err": relative_error(hessian, weight, matrix.float()),
        "nats": None if factors is None else estimate(error, factors.to(error.device)),
        "bits": packed.total_bits,
        "bpw": packed.total_bits / matrix.numel(),
        "sha256": reconstruction_digest(matrix),
    }
    return packed, report


class Rounding:
    """How matrices are rounded: in the metric of Fisher factors, or by their Hessians alone."""

    def __init__(self, run: StageRun, choice: Choice) -> None:
        self.folder = run.folder
        self.options = run.config.rounding
        self.device = run.device
        self.factors = run.inputs.get("sensitivity")
        self.choice = choice
        self.correction = Correction(strength=self.options.correction, damping=self.options.damping)

    def read_factors(self, index: int | Literal["head"]) -> dict[str, Factors]:
        """Return projection → Fisher factors of a sublayer or of the head; empty without any."""
        return {} if self.factors is None else read_factors(self.factors, index, self.device)

    def round(
        self,
        projections: Sequence[ProjectionSpec],
        linears: Mapping[str, Linear],
        hessian: torch.Tensor,
        factors: Mapping[str, Factors],
        *,
        feedback: bool = True,
    ) -> list[RoundedMatrix]:
        """Round the projections that read one activation.

        Args:
            projections: what to round, with the parameters chosen.
            linears: their weights by name.
            hessian: of what they read, fp32 (k, k).
            factors: by name, or empty.
            feedback: whether errors are carried to later rows; False rounds to nearest.
        """
        options = self.options
        found = {name: item.to(hessian.device) for name, item in factors.items()}
        first = projections[0]
        weighted = found[first.name].input if found else None
        name = first.reads
        item = factor(
            mixed(hessian, weighted, options.fisher_share), damping=options.damping, name=name
        )
        if item.remedy:
            self.folder.note(f"{name}: {item.remedy}")
        if not feedback:
            item = item.without_feedback()
        jobs = [
            RoundingJob(
                weight=padded_weight(linears[p.name]),
                params=self.choice[p.key],
                output=found[p.name].output.damped(options.output_damping).blocks
                if found and options.rounds
                else None,
            )
            for p in projections
        ]
        if not (options.rounds and feedback):
            return list(round_matrices(jobs, item, search=options.scale_search))
        damped = item.damped()
        return [
            matrix
            for run in alike(jobs)
            for matrix in refine_together(
                list(round_matrices(run, item, search=options.scale_search)),
                [job.weight for job in run],
                Metric(hessian=damped, output=side_by_side([job.output for job in run])),
                rounds=options.rounds,
                sweeps=options.sweeps,
            )
        ]


class Quantizing:
    """The work of `quantize` at a sublayer."""

    def __init__(self, rounding: Rounding, rows: int) -> None:
        self.rounding = rounding
        self.rows = rows
        self.again = paired_rows(rows) if rounding.options.correction else range(0)

    def file(self, sublayer: SublayerSpec) -> str:
        """See `SublayerWork`."""
        return sublayer_file(sublayer)

    def describe(self, path: Path) -> str:
        """See `SublayerWork`."""
        report = read_report(path)
        return f"bpw={report['bpw']:.3f} rel_err={report['rel_err']:.4f}"

    def replay(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> None:
        """See `SublayerWork`: let states pass the matrices of an earlier run."""
        quantized, source = states[: self.rows], states[self.rows :]
        advance(sublayer, source)
        tensors = read_tensors(path)
        for projection in sublayer.spec.projections:
            matrix = QuantizedMatrix.from_tensors(projection.key, tensors)
            install(sublayer, projection, matrix)
        advance(sublayer, quantized)

    def compute(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> str:
        """See `SublayerWork`: round, pack, and let the states pass quantized."""
        quantized = states[: self.rows]
        kept = range(0, self.rows, max(1, self.rows // ERROR_ROWS))
        crosses = CrossProducts(sublayer, states[self.rows :], self.again)
        hessians, reference = collect_hessians(sublayer, quantized, keep=kept, observe=crosses.add)
        factors = self.rounding.read_factors(sublayer.spec.index)
        source = targets = dict(sublayer.linears)
        if self.again:
            correction = self.rounding.correction
            targets = correction.sublayer_targets(sublayer, quantized, hessians, crosses)
        rounded = self._round(sublayer, targets, hessians, factors)
        tensors: dict[str, torch.Tensor] = {}
        reports: dict[str, object] = {}
        bits = 0
        for projection in sublayer.spec.projections:
            packed, report = quantize_projection(
                projection,
                source[projection.name],
                rounded[projection.name],
                hessians[projection.capture],
                factors.get(projection.name),
            )
            params = str(self.rounding.choice[projection.key])
            reports[projection.name] = {"params": params, **report}
            bits += packed.total_bits
            tensors |= packed.to_tensors(projection.key)
            install(sublayer, projection, packed)
        advance(sublayer, quantized)
        errors = [float((quantized[i] - y).norm() / y.norm()) for i, y in reference.items()]
        numel = sum(
            p.in_features * padded_columns(p.out_features) for p in sublayer.spec.projections
        )
        report = {
            "name": sublayer.spec.name,
            "rel_err": sum(errors) / len(errors),
            "bits": bits,
            "bpw": bits / numel,
            "projections": reports,
        }
        return write_tensors(path, tensors, metadata={"report": json.dumps(report)})

    def _round(
        self,
        sublayer: Sublayer,
        linears: Mapping[str, Linear],
        hessians: Mapping[str, torch.Tensor],
        factors: Mapping[str, Factors],
    ) -> dict[str, RoundedMatrix]:
        """Return projection → rounded matrix, those that read one activation together."""
        rounded: dict[str, RoundedMatrix] = {}
        for capture, hessian in hessians.items():
            members = [p for p in sublayer.spec.projections if p.capture == capture]
            found = self.rounding.round(members, linears, hessian, factors)
            rounded |= {p.name: matrix for p, matrix in zip(members, found, strict=True)}
        return rounded


def install(sublayer: Sublayer, projection: ProjectionSpec, matrix: QuantizedMatrix) -> None:
    """Put a matrix into a sublayer."""
    sublayer.linears[projection.name] = Exl2Linear(
        matrix,
        out_features=projection.out_features,
        dtype=DTYPE,
        device=device_of(sublayer),
    )


def quantize_head(
    run: StageRun, model: SourceModel, work: Quantizing, states: torch.Tensor
) -> None:
    """Quantize the head on the final states and commit its file."""
    rounding = work.rounding
    projection = model.spec.head
    head = model.head()
    quantized, source = states[: work.rows], states[work.rows :]
    hessian = head_hessian(head, quantized)
    target = head.linear
    if work.again:
        paired = quantized[:: work.again.step]
        target = rounding.correction.head_target(head, hessian, paired, source)
    factors = rounding.read_factors("head")
    (matrix,) = rounding.round(
        [projection],
        {projection.name: target},
        hessian,
        factors,
        feedback=head.linear.weight.numel() <= FEEDBACK_LIMIT,
    )
    packed, report = quantize_projection(
        projection, head.linear, matrix, hessian, factors.get(projection.name)
    )
    numel = packed.shape[0] * packed.shape[1]
    params = str(rounding.choice[projection.key])
    summary = {
        "name": projection.key,
        "rel_err": report["rel_err"],
        "bits": packed.total_bits,
        "bpw": packed.total_bits / numel,
        "projections": {projection.name: {"params": params, **report}},
    }
    sha256 = write_tensors(
        run.folder.path / HEAD_FILE,
        packed.to_tensors(projection.key),
        metadata={"report": json.dumps(summary)},
    )
    run.folder.commit(HEAD_FILE, sha256, cursor=run.folder.manifest.total)


@tensor_cores()
@torch.inference_mode()
def quantize(run: StageRun) -> None:
    """Write the stored tensors of every sublayer and of the head into the stage folder."""
    model = SourceModel.open(run.config, run.device)
    run.folder.manifest.total = len(model.spec.sublayers) + 1
    rounding = Rounding(run, read_choice(run.inputs["allocate"]))
    ids = load_rows(run.inputs["tokenize"], "quantize")
    head_is_open = not run.folder.valid(HEAD_FILE)
    work = Quantizing(rounding, len(ids))
    states = walk(run, model, ids, work, to_end=head_is_open)
    if states is not None:
        quantize_head(run, model, work, states)
    total = run.folder.manifest.total
    run.tick(total, total, "lm_head")


def _options(config: ConversionConfig) -> dict[str, object]:
    return {"rope": config.rope.model_dump(), "rounding": config.rounding.model_dump()}


QUANTIZE = Stage(
    name="quantize",
    schema=5,
    inputs=("tokenize", "sensitivity", "allocate"),
    options=_options,
    run=quantize,
)
