"""The refine stage: refit scales and codes of an EXL2 model to the weights it was made from.

Bits, groups, permutations, norms and embedding do not change. States are those of the refined
model: each sublayer is refined for the actual output of the refined ones before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from exl2flow.core import words
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.reports import Json, MatrixReport, SublayerReport, mapping
from exl2flow.core.store.source import DIGESTS_FILE, SourceFingerprint
from exl2flow.core.store.stage import Stage, StageRun
from exl2flow.kernels import tensor_cores
from exl2flow.model import Linear, ProjectionSpec, QuantizedMatrix, Sublayer
from exl2flow.model.files.exl2 import padded_columns
from exl2flow.quant.quantize.dealt import deal_runs
from exl2flow.quant.quantize.matrix_work import (
    HEAD_FILE,
    MatrixWork,
    read_report,
    row_errors,
    summary,
    trained_in_log,
)
from exl2flow.quant.quantize.routing import experts_in_log
from exl2flow.quant.quantize.stage import needs
from exl2flow.quant.quantize.stored_form import Packed, Unchanged, install, storing
from exl2flow.quant.refine.improvement import improve, params_of
from exl2flow.quant.refine.stored_model import StoredModel
from exl2flow.quant.rounding.coverage import Coverage
from exl2flow.quant.rounding.error_feedback import RoundedMatrix, near, padded_weight
from exl2flow.quant.rounding.hessian import (
    HessianFactor,
    collect_hessians,
    dealt_head_hessian,
    relative_error,
)
from exl2flow.quant.sensitivity.fisher import Factors, estimate
from exl2flow.quant.tokenize.stage import judging_texts, unjudged_rows
from exl2flow.quant.training.block import Texts
from exl2flow.quant.walk.limits import effect_of_limit
from exl2flow.quant.walk.pinned import made_to_fit
from exl2flow.quant.walk.source_model import SourceModel
from exl2flow.quant.walk.walk import Store, advance, walk

KEPT = "kept"  # report of a matrix that is not refined


@dataclass(frozen=True, slots=True, kw_only=True)
class Refined:
    """A replacement of a stored matrix, trained if it is; params, figures: for its report."""

    matrix: RoundedMatrix
    params: str
    figures: Json


class Refining(MatrixWork):
    """The work of `refine` at a sublayer, and at the head."""

    def __init__(
        self,
        run: StageRun[RefinementConfig],
        rows: int,
        stored: StoredModel,
        texts: Texts | None = None,
    ) -> None:
        """Begin; see `MatrixWork`."""
        super().__init__(run, stored.spec, rows, texts)
        self.stored = stored

    def describe(self, path: Path) -> str:
        """Return bits per weight and errors of the sublayer."""
        report = read_report(path)
        before = mapping(report.before).get("rel_err")
        change = f"{words.error(before)}->{words.error(report.rel_err)}"
        more = trained_in_log(report) + experts_in_log(report)
        return f"bpw={words.bits(report.bpw)} rel_err={change}{more}"

    def compute(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> Store | None:
        """See `SublayerWork`: refine, pack, and advance the states through the result."""
        worked_on, projections = states[: self.worked_on], sublayer.spec.projections
        coverage = Coverage.of(sublayer, worked_on, self.options.expert_tokens, self.deal)
        _, owners = deal_runs(sublayer, self.deal.ranks)
        hessians, reference = collect_hessians(
            sublayer,
            worked_on,
            keep=self.error_rows,
            coverage=coverage,
            deal=self.deal,
            owners=owners,
        )
        weights = dict(sublayer.linears)
        before = {p.name: self.stored.matrix(p) for p in projections}
        for p in projections:
            install(sublayer, p, before[p.name])
        errors = row_errors(sublayer, self._output(sublayer, worked_on), reference)
        sublayer.linears.update(weights)
        factors = self.read_factors(sublayer.spec.index)
        refined = dict[str, Refined | None]()
        for capture, hessian in hessians.items():
            members = sublayer.spec.reading(capture)
            item = self.factor(members[0], hessian, factors)
            for p in members:
                fisher = factors.get(p.name)
                old, weight = before[p.name], weights[p.name]
                refined[p.name] = self._refine(old, weight, item, hessian, fisher)
        trained = self._train(sublayer, before, refined, factors, states)
        own = {
            p.name: self._packed(
                *(p, before[p.name], weights[p.name], refined[p.name]),
                *(hessians[p.capture], factors.get(p.name)),
            )
            for p in projections
            if p.name in refined
        }
        packed, after = self.installed(sublayer, own, states, reference)
        of_all = self.deal.ranks.gather(torch.stack([errors, after], dim=1))
        if of_all is None:
            return None

        def finish(
            reports: Sequence[MatrixReport], host: Mapping[str, torch.Tensor]
        ) -> SublayerReport:
            begun, ended = (float(of_rows.mean()) for of_rows in host["errors"].unbind(1))
            return replace(
                summary(sublayer.spec.name, packed, reports),
                rel_err=ended,
                before={"rel_err": begun},
                experts=None if coverage is None else coverage.report(),
                trained=trained,
            )

        return storing(path, packed, {"errors": of_all}, finish)

    def _output(self, sublayer: Sublayer, states: torch.Tensor) -> torch.Tensor:
        """Return what a sublayer makes of the rows whose errors are reported, of this rank's."""
        first, found = self.deal.own.start, [states[:0]]
        for piece in self.deal.pieces:
            here = range(piece.start, piece.stop)
            rows = states[[row - first for row in self.error_rows if row - first in here]]
            advance(sublayer, rows)
            found.append(rows)
        return torch.cat(found)

    def head(self, model: SourceModel, states: torch.Tensor) -> None:
        """Refine the head on the final states and commit its file; rank 0 does."""
        projection, head = model.spec.head, model.head()
        hessian = dealt_head_hessian(head, states[: self.worked_on], self.deal)
        if hessian is None:
            return
        factors = self.read_factors("head")
        item = self.factor(projection, hessian, factors)
        old, fisher = self.stored.matrix(projection), factors.get(projection.name)
        refined = self._refine(old, head.linear, item, hessian, fisher)
        self.store_head(self._packed(projection, old, head.linear, refined, hessian, fisher))

    def _refine(
        self,
        stored: QuantizedMatrix,
        linear: Linear,
        item: HessianFactor,
        hessian: torch.Tensor,
        factors: Factors | None,
    ) -> Refined | None:
        """Return the replacement of a stored matrix; None: it has more columns than needed."""
        if not _is_refined(stored, linear):
            return None
        weight = padded_weight(linear)
        values = near(weight, linear)
        old = RoundedMatrix.of(stored, values.device)
        factors = factors and factors.to(values.device)
        improvement = improve(old, weight, item, self.output_metric(factors), self.options)
        decoded = old.dequantize()
        figures = {
            "start": improvement.start,
            "losses": dict(improvement.losses),
            "before": {
                "rel_err": float(relative_error(hessian, values, decoded)),
                "nats": None if factors is None else estimate(decoded, factors, less=values),
                "loss": improvement.before,
            },
        }
        params = str(params_of(old.groups) or "")
        return Refined(matrix=improvement.matrix, params=params, figures=figures)

    def _train(
        self,
        sublayer: Sublayer,
        before: Mapping[str, QuantizedMatrix],
        refined: dict[str, Refined | None],
        factors: Mapping[str, Factors],
        states: torch.Tensor,
    ) -> float | None:
        """Train the matrices of a sublayer unless one stays; see `MatrixWork.trained`."""
        if not all(_is_refined(old, sublayer.linears[name]) for name, old in before.items()):
            return None
        found = {name: each for name, each in refined.items() if each is not None}
        rounded = {name: each.matrix for name, each in found.items()}
        rounded, trained = self.trained(sublayer, rounded, factors, states)
        refined.update({n: replace(found[n], matrix=matrix) for n, matrix in rounded.items()})
        return trained

    def _packed(
        self,
        projection: ProjectionSpec,
        stored: QuantizedMatrix,
        linear: Linear,
        refined: Refined | None,
        hessian: torch.Tensor,
        factors: Factors | None,
    ) -> Packed:
        """Return what replaces a stored matrix, with its report; without a replacement, itself."""
        if refined is None:
            values = near(padded_weight(linear), linear)
            return self._kept(projection, stored, values, hessian)
        return Packed(
            projection,
            linear,
            refined.matrix,
            hessian,
            factors,
            params=refined.params,
            refined=refined.figures,
        )

    def _kept(
        self,
        projection: ProjectionSpec,
        stored: QuantizedMatrix,
        weight: torch.Tensor,
        hessian: torch.Tensor,
    ) -> Unchanged:
        """Return a matrix unchanged that is stored with more columns than needed."""
        decoded = stored.dequantize()
        used = decoded[:, : weight.shape[1]].float().to(weight.device)
        error = float(relative_error(hessian, weight, used))
        self.folder.note(f"{projection.key}: {stored.shape[1]} columns, kept as they are")
        report = MatrixReport(
            name=projection.name,
            key=projection.key,
            rel_err=error,
            bits=stored.total_bits,
            bpw=stored.total_bits / decoded.numel(),
            refined={"start": KEPT, "before": {"rel_err": error}},
        )
        return Unchanged(projection, stored, report)


def _is_refined(stored: QuantizedMatrix, linear: Linear) -> bool:
    """Return whether a stored matrix has the columns that it needs, and no more."""
    out_features, k = linear.weight.shape
    return stored.shape == (k, padded_columns(out_features))


def hessian_rows(folder: Path, held_out: int) -> torch.Tensor:
    """Return the calibration rows int64 (rows, t) without the held-out ones and their text."""
    return unjudged_rows(folder, "quantize", held_out)


@tensor_cores()
@torch.no_grad()
def refine_model(run: StageRun[RefinementConfig]) -> None:
    """Write the replacements of the stored matrices into the stage folder."""
    config = run.config
    stored = StoredModel.open(config, run.device)
    model = replace(stored.with_reference(), keeps_states=run.keeps_states)
    run.folder.manifest.total = len(model.spec.sublayers) + stored.has_head
    folder, held_out = run.inputs["tokenize"], config.held_out_rows
    ids = hessian_rows(folder, held_out)
    texts = judging_texts(folder, held_out) if config.rounding.block_steps else None
    head_is_open = stored.has_head and not run.folder.valid(HEAD_FILE)
    work = Refining(run, len(ids), stored, texts)
    ids = torch.cat([ids, *(texts or {}).values()])
    states = walk(run, model, ids, work, to_end=head_is_open)
    if states is not None:
        finish = partial(work.head, model, states)
        finish() if run.ranks.are_many else made_to_fit(finish)
    total = run.folder.manifest.total
    run.tick(total, total, "refined")


def _options(config: RefinementConfig) -> dict[str, object]:
    memory = config.work_dir_root / DIGESTS_FILE
    return {
        "model": SourceFingerprint.of(config.model, memory=memory).fingerprint,
        "rope": config.rope.model_dump(),
        "rounding": config.rounding.fingerprinted(),
        "held_out_rows": config.held_out_rows,
    }


REFINE: Stage[RefinementConfig] = Stage(
    name="refine",
    schema=5,
    inputs=("tokenize", "sensitivity"),
    options=_options,
    run=refine_model,
    files=lambda config: config.model.glob("*"),
    gpu_options=lambda config: effect_of_limit(config, config.calibration.row_tokens),
    needs=partial(needs, corrects=False),
    removable=True,
    is_dealt=lambda config: True,
)
