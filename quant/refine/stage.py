"""The refine stage: refit scales and codes of an EXL2 model to the weights it was made from.

Bits, groups, permutations, norms and embedding do not change. States are those of the refined
model: each sublayer is refined for the actual output of the refined ones before it.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.background import to_host
from exl2flow.core.store.files import read_tensors, write_tensors
from exl2flow.core.store.source import DIGESTS_FILE, SourceFingerprint
from exl2flow.core.store.stage import Stage, StageRun
from exl2flow.kernels import tensor_cores
from exl2flow.model import Linear, ProjectionSpec, Sublayer, SublayerSpec
from exl2flow.model.files.exl2 import QuantizedMatrix, padded_columns
from exl2flow.quant.quantize.stage import (
    ERROR_ROWS,
    HEAD_FILE,
    install,
    read_report,
    sublayer_file,
)
from exl2flow.quant.quantize.stored_form import Packed
from exl2flow.quant.refine.improvement import improve, params_of, unpacked
from exl2flow.quant.refine.stored_model import StoredModel, refinement
from exl2flow.quant.rounding.error_feedback import near, padded_weight
from exl2flow.quant.rounding.hessian import (
    HessianFactor,
    collect_hessians,
    head_hessian,
    relative_error,
)
from exl2flow.quant.sensitivity.fisher import Factors, estimate, shared_factor
from exl2flow.quant.sensitivity.stage import FactorFiles
from exl2flow.quant.tokenize.stage import load_rows, split_rows
from exl2flow.quant.walk.limits import effect_of_limit
from exl2flow.quant.walk.source_model import SourceModel, device_of
from exl2flow.quant.walk.walk import Store, advance, walk

log = logging.getLogger(__name__)

KEPT = "kept"  # report of a matrix that is not refined


class Refining:
    """The work of `refine` at a sublayer, and at the head."""

    again = range(0)

    def __init__(self, run: StageRun, stored: StoredModel) -> None:
        self.run = run
        self.stored = stored
        self.options = run.config.rounding
        factors = run.inputs.get("sensitivity")
        self.factors = factors and FactorFiles(factors, torch.device(run.device))

    def file(self, sublayer: SublayerSpec) -> str:
        """See `SublayerWork`."""
        return sublayer_file(sublayer)

    def describe(self, path: Path) -> str:
        """Return bits per weight and errors of the sublayer."""
        report = read_report(path)
        before: Any = report["before"]
        change = f"{before['rel_err']:.4f}->{report['rel_err']:.4f}"
        return f"bpw={report['bpw']:.3f} rel_err={change}"

    def replay(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> None:
        """See `SublayerWork`: advance states through the matrices in `path`."""
        tensors = read_tensors(path)
        for projection in sublayer.spec.projections:
            matrix = QuantizedMatrix.from_tensors(projection.key, tensors)
            install(sublayer, projection, matrix.to(device_of(sublayer)))
        advance(sublayer, states)

    def compute(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> Store:
        """See `SublayerWork`: refine, pack, and advance the states through the result."""
        kept = range(0, len(states), max(1, len(states) // ERROR_ROWS))
        hessians, reference = collect_hessians(sublayer, states, keep=kept)
        weights = dict(sublayer.linears)
        before = {p.name: self.stored.matrix(p) for p in sublayer.spec.projections}
        for p in sublayer.spec.projections:
            install(sublayer, p, before[p.name])
        kept_states = states[list(reference)].clone()
        advance(sublayer, kept_states)
        errors = _errors(kept_states, reference)
        factors = self._read_factors(sublayer.spec.index)
        tensors: dict[str, torch.Tensor] = {}
        reports: dict[str, dict[str, object]] = {}
        for capture, hessian in hessians.items():
            members = sublayer.spec.reading(capture)
            item = self._factor(members[0], hessian, factors)
            for p in members:
                packed, reports[p.name] = self._refine(
                    p, before[p.name], weights[p.name], item, hessian, factors.get(p.name)
                )
                tensors |= packed.to_tensors(p.key)
                install(sublayer, p, packed)
        advance(sublayer, states)
        report = _report(sublayer.spec.name, sublayer.spec.projections, reports) | {
            "rel_err": _errors(states[list(reference)], reference),
            "before": {"rel_err": errors},
        }
        metadata = {"report": json.dumps(report)}
        return partial(write_tensors, path, tensors, metadata=metadata)

    def head(self, model: SourceModel, states: torch.Tensor) -> None:
        """Refine the head on the final states and commit its file."""
        projection, head = model.spec.head, model.head()
        hessian = head_hessian(head, states)
        factors = self._read_factors("head")
        matrix, report = self._refine(
            projection,
            self.stored.matrix(projection),
            head.linear,
            self._factor(projection, hessian, factors),
            hessian,
            factors.get(projection.name),
        )
        summary = _report(projection.key, (projection,), {projection.name: report}) | {
            "rel_err": report["rel_err"],
            "before": report["before"],
        }
        folder = self.run.folder
        sha256 = write_tensors(
            folder.path / HEAD_FILE,
            matrix.to_tensors(projection.key),
            metadata={"report": json.dumps(summary)},
        )
        folder.commit(HEAD_FILE, sha256, cursor=folder.manifest.total)

    def _read_factors(self, index: int | Literal["head"]) -> dict[str, Factors]:
        return self.factors.read(index) if self.factors else {}

    def _factor(
        self, first: ProjectionSpec, hessian: torch.Tensor, factors: Mapping[str, Factors]
    ) -> HessianFactor:
        """Return the factor of an activation, given the first projection that reads it."""
        return shared_factor(first, hessian, factors, self.options, note=self.run.folder.note)

    def _refine(
        self,
        projection: ProjectionSpec,
        stored: QuantizedMatrix,
        linear: Linear,
        item: HessianFactor,
        hessian: torch.Tensor,
        factors: Factors | None,
    ) -> tuple[QuantizedMatrix, dict[str, object]]:
        """Return the replacement of a stored matrix, and the report on it."""
        weight = padded_weight(linear)
        values = near(weight, linear)
        old = unpacked(stored, values.device)
        if stored.shape != tuple(weight.shape):
            return self._kept(projection, stored, values, hessian)
        output = None
        if factors is not None:
            factors = factors.to(values.device)
            output = factors.output.damped(self.options.output_damping).blocks
        made = improve(old, weight, item, output, self.options)
        packed = Packed(projection, linear, made.matrix, hessian, factors)
        found = old.dequantize()
        return packed.matrix, {
            "params": str(params_of(old.groups) or ""),
            **packed.report(to_host(packed.tensors())()),
            "start": made.start,
            "losses": dict(made.losses),
            "before": {
                "rel_err": float(relative_error(hessian, values, found)),
                "nats": None if factors is None else estimate(found, factors, less=values),
                "loss": made.before,
            },
        }

    def _kept(
        self,
        projection: ProjectionSpec,
        stored: QuantizedMatrix,
        weight: torch.Tensor,
        hessian: torch.Tensor,
    ) -> tuple[QuantizedMatrix, dict[str, object]]:
        """Return a matrix unchanged that is stored with more columns than needed."""
        found = stored.dequantize()
        used = found[:, : weight.shape[1]].float().to(weight.device)
        error = float(relative_error(hessian, weight, used))
        self.run.folder.note(f"{projection.key}: {stored.shape[1]} columns, kept as they are")
        return stored, {
            "rel_err": error,
            "bits": stored.total_bits,
            "bpw": stored.total_bits / found.numel(),
            "start": KEPT,
            "before": {"rel_err": error},
        }


def _errors(states: torch.Tensor, reference: Mapping[int, torch.Tensor]) -> float:
    """Return the mean relative error of rows fp32 (rows, t, hidden), in the reference's order."""
    pairs = zip(states, reference.values(), strict=True)
    errors = [float((found - expected).norm() / expected.norm()) for found, expected in pairs]
    return sum(errors) / len(errors)


def _report(
    name: str, projections: Sequence[ProjectionSpec], reports: Mapping[str, Mapping[str, object]]
) -> dict[str, object]:
    """Return the part of a report that is common to sublayers and head."""
    bits = sum(int(str(report["bits"])) for report in reports.values())
    numel = sum(p.in_features * padded_columns(p.out_features) for p in projections)
    return {"name": name, "bits": bits, "bpw": bits / numel, "projections": reports}


def hessian_rows(folder: Path, held_out: int) -> torch.Tensor:
    """Return the calibration rows int64 (rows, t) without the held-out ones."""
    ids = load_rows(folder, "quantize")
    _, judges = split_rows(folder, held_out)
    is_judge = (ids[:, None] == judges[None]).all(dim=2).any(dim=1)
    return ids[~is_judge]


@tensor_cores()
@torch.inference_mode()
def refine_model(run: StageRun) -> None:
    """Write the replacements of the stored matrices into the stage folder."""
    config = refinement(run.config)
    stored = StoredModel.open(config, run.device)
    model = stored.with_reference()
    run.folder.manifest.total = len(model.spec.sublayers) + stored.has_head
    ids = hessian_rows(run.inputs["tokenize"], config.held_out_rows)
    head_is_open = stored.has_head and not run.folder.valid(HEAD_FILE)
    work = Refining(run, stored)
    states = walk(run, model, ids, work, to_end=head_is_open)
    if states is not None:
        work.head(model, states)
    total = run.folder.manifest.total
    run.tick(total, total, "refined")


def _options(config: ConversionConfig) -> dict[str, object]:
    options = refinement(config)
    memory = config.work_dir_root / DIGESTS_FILE
    return {
        "model": SourceFingerprint.of(options.model, memory=memory).fingerprint,
        "rope": config.rope.model_dump(),
        "rounding": config.rounding.model_dump(),
        "held_out_rows": options.held_out_rows,
    }


REFINE = Stage(
    name="refine",
    schema=4,
    inputs=("tokenize", "sensitivity"),
    options=_options,
    run=refine_model,
    files=lambda config: refinement(config).model.glob("*"),
    gpu_options=lambda config: effect_of_limit(config, config.calibration.row_tokens),
)
