"""Quantize every sublayer with its chosen candidate, then the head.

States are those of the quantized model: each sublayer is rounded for the actual output of the
sublayers before it. One file per sublayer holds the stored tensors; its header holds the errors and
the digest of every reconstruction, which `compile` checks after writing.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from exl2flow.core import words
from exl2flow.core.options.config import HELD_OUT_ROWS, RunOptions
from exl2flow.core.reports import MatrixReport, SublayerReport
from exl2flow.core.runtime.memory import limit_of
from exl2flow.core.store.files import read_metadata, read_tensors
from exl2flow.core.store.need import Need
from exl2flow.core.store.stage import Stage, StageRun
from exl2flow.kernels import get_ops, record_stream, run_concurrently, tensor_cores
from exl2flow.model import (
    Linear,
    ModelSpec,
    ProjectionSpec,
    Sublayer,
    SublayerSpec,
)
from exl2flow.model.files.exl2 import QuantizedMatrix
from exl2flow.quant.allocate.budget import read_choice
from exl2flow.quant.allocate.layout import Choice
from exl2flow.quant.quantize.correction import (
    Correction,
    CrossProducts,
    advance_source,
    paired_rows,
)
from exl2flow.quant.quantize.routing import experts_in_log
from exl2flow.quant.quantize.stored_form import Packed, install, storing
from exl2flow.quant.rounding.coverage import Coverage
from exl2flow.quant.rounding.descent import Metric, refine_together
from exl2flow.quant.rounding.error_feedback import (
    RoundedMatrix,
    RoundingJob,
    alike,
    padded_weight,
    round_matrices,
    round_together,
    side_by_side,
)
from exl2flow.quant.rounding.hessian import (
    HessianFactor,
    collect_hessians,
    head_hessian,
    widest_first,
)
from exl2flow.quant.rounding.together import runs_together
from exl2flow.quant.sensitivity.fisher import Factors, shared_factors
from exl2flow.quant.sensitivity.stage import FactorFiles
from exl2flow.quant.tokenize.stage import judging_texts, load_rows, unjudged_rows
from exl2flow.quant.training.block import (
    BlockRows,
    Texts,
    block_bytes,
    corrected_output,
    output_metric_of,
    row_bytes,
    train_block,
    trains_within,
)
from exl2flow.quant.training.kept import kept_in
from exl2flow.quant.walk.limits import effect_of_limit
from exl2flow.quant.walk.needs import FLOAT, SUBLAYER_WEIGHT, ModelSizes
from exl2flow.quant.walk.pinned import made_to_fit
from exl2flow.quant.walk.source_model import SourceModel, device_of, relative_distance
from exl2flow.quant.walk.walk import STATE_FILES, Store, SublayerWork, advance, walk
from exl2flow.quant.walk.working_memory import stored_elements

HEAD_FILE = "sublayers/head.safetensors"
CORRECTED_WEIGHT = 8  # bytes per weight more: corrected targets, and one being computed
JUDGING_ROWS = 3 * HELD_OUT_ROWS  # at most, of all texts that judge
ERROR_ROWS = 16  # rows whose unquantized outputs are kept to report a sublayer's error


def sublayer_file(sublayer: SublayerSpec) -> str:
    """Return the name of a sublayer's tensors inside the stage folder of `quantize`."""
    return f"sublayers/{sublayer.index:04d}.{sublayer.kind}.safetensors"


def result_files(spec: ModelSpec) -> list[str]:
    """Return the files of a finished `quantize` stage, in model order."""
    return [*map(sublayer_file, spec.sublayers), HEAD_FILE]


def read_report(path: Path) -> SublayerReport:
    """Return the report on a quantized sublayer: errors, parameters, reconstruction digests."""
    return SublayerReport.from_json(json.loads(read_metadata(path)["report"]))


def trained_in_log(report: SublayerReport) -> str:
    """Return what training did to a sublayer's error; empty: nothing."""
    return "" if report.trained is None else f" trained={report.trained:.3f}"


class MatrixWork(SublayerWork):
    """Base for work whose results are the matrices of each sublayer, and of the head.

    States are those of the model with its new matrices; the source's own ones of `again` follow.
    Matrices are rounded in the metric of Fisher factors, or by their Hessians alone.
    """

    def __init__(
        self,
        run: StageRun[RunOptions],
        spec: ModelSpec,
        rows: int,
        texts: Texts | None = None,
    ) -> None:
        """Begin.

        Args:
            run: the stage.
            spec: of the model.
            rows: to work on.
            texts: whose rows follow these and judge sublayers that are trained; None: none is.
        """
        self.folder = run.folder
        self.options = run.config.rounding
        self.spec, self.texts = spec, texts
        self.worked_on, self.rows = rows, rows + sum(map(len, (texts or {}).values()))
        self.paired = range(0)  # rows of the source whose errors are corrected
        self.error_rows = range(0, rows, max(1, rows // ERROR_ROWS))
        factors = run.inputs.get("sensitivity")
        self.factors = factors and FactorFiles(factors, run.device)

    def file(self, sublayer: SublayerSpec) -> str:
        """See `SublayerWork`."""
        return sublayer_file(sublayer)

    def replay(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> None:
        """See `SublayerWork`: advance states through the matrices of an earlier run."""
        quantized, source = states[: self.rows], states[self.rows :]
        pairs = CrossProducts(sublayer, source[: len(self.paired)], self.paired)
        advance_source(sublayer, pairs, quantized[: self.worked_on])
        advance(sublayer, source[len(self.paired) :])
        tensors = read_tensors(path)
        for projection in sublayer.spec.projections:
            matrix = QuantizedMatrix.from_tensors(projection.key, tensors)
            install(sublayer, projection, matrix.to(device_of(sublayer)))
        advance(sublayer, quantized)

    def read_factors(self, index: int | Literal["head"]) -> dict[str, Factors]:
        """Return projection → Fisher factors of a sublayer or the head; empty if there are none."""
        return self.factors.read(index) if self.factors else {}

    def factor(
        self, first: ProjectionSpec, hessian: torch.Tensor, factors: Mapping[str, Factors]
    ) -> HessianFactor:
        """Return the factor of an activation, given the first projection that reads it."""
        return self.factored([first], [hessian], factors)[0]

    def factored(
        self,
        firsts: Sequence[ProjectionSpec],
        hessians: Sequence[torch.Tensor],
        factors: Mapping[str, Factors],
    ) -> list[HessianFactor]:
        """Return the factors of activations, given the first projection that reads each."""
        return shared_factors(firsts, hessians, factors, self.options, note=self.folder.note)

    def output_metric(self, factors: Factors | None) -> torch.Tensor | None:
        """Return the metric of errors in one row of a matrix, fp32 (blocks, b, b)."""
        if factors is None or not self.options.rounds:
            return None
        return factors.output.damped(self.options.output_damping).blocks

    def trained(
        self,
        sublayer: Sublayer,
        rounded: dict[str, RoundedMatrix],
        factors: Mapping[str, Factors],
        states: torch.Tensor,
        *,
        returned: torch.Tensor | None = None,
    ) -> tuple[dict[str, RoundedMatrix], float | None]:
        """Return matrices trained on what the source returns, see `train_block`, if memory allows.

        Args:
            sublayer: with the source's weights.
            rounded: projection → matrix.
            factors: of the projections, or empty.
            states: that enter it, fp32 (rows, t, hidden).
            returned: what the source's own have become, or None.
        """
        if self.texts is None:
            return rounded, None
        device, spec, tokens = device_of(sublayer), sublayer.spec, states.shape[1]
        limit = limit_of(device) if device.type == "cuda" else None
        if not trains_within(limit, self.spec, spec, tokens):
            self.folder.note(f"{spec.name}: not trained, which takes too much memory")
            return rounded, None
        last = [p.name for p in sublayer.spec.projections if p.is_last]
        damping = self.options.output_damping
        outputs = [factors[name].output.damped(damping) for name in last if factors]
        rows = BlockRows(
            device=device,
            states=states,
            wanted=corrected_output(sublayer, returned, self.options.correction),
            metric=output_metric_of(sublayer, outputs),
            texts=self.texts,
            at_once=max(1, kept_in(limit) // row_bytes(self.spec, spec, tokens)),
        )
        return train_block(rounded, sublayer, rows, self.options)

    def store_head(self, packed: Packed) -> None:
        """Write the head's matrix and its report, and commit the file."""
        sha256 = self.store_alone(packed, HEAD_FILE)
        self.folder.commit(HEAD_FILE, sha256, cursor=self.folder.manifest.total)

    def store_alone(self, packed: Packed, file: str) -> str:
        """Write a matrix that belongs to no sublayer, with its report; return the sha256."""

        def finish(
            reports: Sequence[MatrixReport], host: Mapping[str, torch.Tensor]
        ) -> SublayerReport:
            (report,) = reports
            alone = summary(packed.projection.key, [packed], reports)
            return replace(alone, rel_err=report.rel_err, before=report.refined.get("before"))

        return storing(self.folder.path / file, [packed], {}, finish)()


def summary(
    name: str, packed: Sequence[Packed], matrices: Sequence[MatrixReport]
) -> SublayerReport:
    """Return the report on a sublayer or the head, without its own errors."""
    bits = sum(item.matrix.total_bits for item in packed)
    numel = sum(stored_elements(item.projection) for item in packed)
    return SublayerReport(name=name, bits=bits, bpw=bits / numel, matrices=tuple(matrices))


def row_errors(
    sublayer: Sublayer, states: Iterable[torch.Tensor], reference: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """Return the relative error of each row of states, in the reference's order, fp32 (rows,).

    That of a group of experts is the error of the states that its layer would return without the
    groups after it, so squares of all groups add up to about that of the layer.
    """
    device = device_of(sublayer)

    def settled(row: torch.Tensor) -> torch.Tensor:
        return sublayer.settled(row.to(device, non_blocking=True))

    pairs = zip(states, reference.values(), strict=True)
    return torch.stack([relative_distance(settled(row), settled(y)) for row, y in pairs])


class Quantizing(MatrixWork):
    """The work of `quantize` at a sublayer, and at the head."""

    def __init__(
        self,
        run: StageRun[RunOptions],
        spec: ModelSpec,
        rows: int,
        choice: Choice,
        texts: Texts | None = None,
    ) -> None:
        """Begin; see `MatrixWork`."""
        super().__init__(run, spec, rows, texts)
        self.choice = choice
        if texts is not None:
            self.paired, self.again = range(rows), range(self.rows)
        elif self.options.correction:
            self.paired = self.again = paired_rows(rows)
        self.correction = Correction(
            strength=self.options.correction, damping=self.options.damping, note=run.folder.note
        )

    def describe(self, path: Path) -> str:
        """See `SublayerWork`."""
        report = read_report(path)
        figures = f"bpw={words.bits(report.bpw)} rel_err={words.error(report.rel_err)}"
        return figures + trained_in_log(report) + experts_in_log(report)

    def compute(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> Store:
        """See `SublayerWork`: round, pack, and advance the states quantized."""
        quantized, twins = states[: self.rows], states[self.rows :]
        worked_on = quantized[: self.worked_on]
        crosses = CrossProducts(sublayer, twins[: len(self.paired)], self.paired)
        coverage = Coverage.of(sublayer, worked_on, self.options.expert_tokens)
        hessians, reference = collect_hessians(
            sublayer, worked_on, keep=self.error_rows, observe=crosses, coverage=coverage
        )
        advance(sublayer, twins[len(self.paired) :])
        source, targets = dict(sublayer.linears), dict(sublayer.linears)
        if self.options.correction:
            targets = self.correction.sublayer_targets(
                sublayer, worked_on, hessians, crosses, coverage
            )
        factors = self.read_factors(sublayer.spec.index)
        rounded = self._round_sublayer(sublayer, targets, hessians, factors)
        rounded, trained = self.trained(sublayer, rounded, factors, quantized, returned=twins)
        packed = []
        for p in sublayer.spec.projections:
            item = self._packed(p, source[p.name], rounded[p.name], hessians[p.capture], factors)
            packed.append(item)
            install(sublayer, p, item.matrix)
        advance(sublayer, quantized)
        errors = row_errors(sublayer, (quantized[row] for row in reference), reference)

        def finish(
            reports: Sequence[MatrixReport], host: Mapping[str, torch.Tensor]
        ) -> SublayerReport:
            experts = None if coverage is None else coverage.report(crosses.changed_routes())
            return replace(
                summary(sublayer.spec.name, packed, reports),
                rel_err=float(host["errors"].mean()),
                experts=experts,
                trained=trained,
            )

        return storing(path, packed, {"errors": errors}, finish)

    def head(self, model: SourceModel, states: torch.Tensor) -> None:
        """Quantize the head on the final states and commit its file."""
        projection, head = model.spec.head, model.head()
        quantized = states[: self.worked_on]
        source = states[self.rows :][: len(self.paired)]
        hessian = head_hessian(head, quantized)
        factors = self.read_factors("head")

        def target() -> Linear:
            if not self.options.correction:
                return head.linear
            paired = quantized[:: self.paired.step]
            return self.correction.head_target(head, hessian, paired, source)

        # keep no reference to targets and weights, which are as large as the head
        jobs = [self._job(projection, target(), factors)]
        (matrix,) = self._round(jobs, self.factored([projection], [hessian], factors))
        self.store_head(self._packed(projection, head.linear, matrix, hessian, factors))

    def alone(self, projection: ProjectionSpec, linear: Linear, hessian: torch.Tensor) -> Packed:
        """Round and pack a matrix that belongs to no sublayer, by its Hessian fp32 (k, k)."""
        items = self.factored([projection], [hessian], {})
        (matrix,) = self._round([self._job(projection, linear, {})], items)
        return self._packed(projection, linear, matrix, hessian, {})

    def _job(
        self, projection: ProjectionSpec, linear: Linear, factors: Mapping[str, Factors]
    ) -> RoundingJob:
        output = self.output_metric(factors.get(projection.name))
        params = self.choice[projection.key]
        return RoundingJob(weight=padded_weight(linear), params=params, output=output)

    def _packed(
        self,
        projection: ProjectionSpec,
        linear: Linear,
        rounded: RoundedMatrix,
        hessian: torch.Tensor,
        factors: Mapping[str, Factors],
    ) -> Packed:
        params, fisher = str(self.choice[projection.key]), factors.get(projection.name)
        return Packed(projection, linear, rounded, hessian, fisher, params=params)

    def _round_together(
        self, jobs: list[RoundingJob], items: list[HessianFactor]
    ) -> list[RoundedMatrix]:
        """Round alike matrices of several experts side by side.

        Args:
            jobs: the matrices, equally many of each expert.
            items: the factors of what the experts read; emptied.
        """
        options = self.options
        rounded = round_together(jobs, items, search=options.scale_search)
        if not options.rounds:
            return rounded
        hessians = [item.hessian for item in items]
        items.clear()
        metric = Metric(
            hessian=torch.stack([hessian.matrix() for hessian in hessians]),
            output=side_by_side([job.output for job in jobs]),
        )
        weights = [job.weight for job in jobs]
        return refine_together(
            rounded, weights, metric, rounds=options.rounds, sweeps=options.sweeps
        )

    def _round(self, jobs: list[RoundingJob], items: list[HessianFactor]) -> list[RoundedMatrix]:
        """Round matrices that read one activation.

        Args:
            jobs: the matrices; emptied, and freed early if unreferenced elsewhere.
            items: the factor of what they read; emptied likewise.
        """
        options, item = self.options, items.pop()
        hessian, rounded = item.hessian, round_matrices(jobs, item, search=options.scale_search)
        record_stream(item.upper)
        del item
        begun = list(rounded)
        if not options.rounds:
            return begun
        damped, refined = hessian.matrix(), list[RoundedMatrix]()
        while jobs:
            run = next(alike(jobs))
            del jobs[: len(run)]
            weights = [job.weight for job in run]
            metric = Metric(hessian=damped, output=side_by_side([job.output for job in run]))
            starts = [begun.pop(0) for _ in run]
            del run
            refined += refine_together(
                starts, weights, metric, rounds=options.rounds, sweeps=options.sweeps
            )
        return refined

    def _round_sublayer(
        self,
        sublayer: Sublayer,
        targets: dict[str, Linear],
        hessians: Mapping[str, torch.Tensor],
        factors: Mapping[str, Factors],
    ) -> dict[str, RoundedMatrix]:
        """Return projection → rounded matrix; readers of one activation are rounded together.

        Empties `targets`: each is as large as the sublayer's weights.
        """
        jobs = {
            p.name: self._job(p, targets.pop(p.name), factors) for p in sublayer.spec.projections
        }

        spec = sublayer.spec

        def factored(run: Sequence[str]) -> list[HessianFactor]:
            firsts = [spec.reading(capture)[0] for capture in run]
            return self.factored(firsts, [hessians[capture] for capture in run], factors)

        # experts are rounded run by run, so that memory does not grow with their number
        items = {} if spec.group else {capture: factored([capture]) for capture in hessians}

        def work(run: Sequence[str]) -> dict[str, RoundedMatrix]:
            names = [p.name for capture in run for p in spec.reading(capture)]
            own = [jobs[name] for name in names]
            # already used if this runs a second time, or of experts
            found = items.pop(run[0]) if run[0] in items else factored(run)
            round_run = self._round if len(run) == 1 else self._round_together
            return dict(zip(names, round_run(own, found), strict=True))

        runs = runs_together(spec, widest_first(hessians), device_of(sublayer))
        works = [partial(work, run) for run in runs]
        parts = run_concurrently(works, device_of(sublayer))
        rounded = {name: matrix for part in parts for name, matrix in part.items()}
        for matrix in rounded.values():
            record_stream(matrix.codes, matrix.scale_codes, matrix.max_scales)
        return rounded


@tensor_cores()
@torch.no_grad()
def quantize(run: StageRun[RunOptions]) -> None:
    """Write the stored tensors of every sublayer and of the head into the stage folder."""
    model = SourceModel.open(run.config, run.device)
    ops = get_ops(run.device)
    ops.prepare_rounding()
    if run.config.writes_sample:  # when validating
        ops.prepare()
    run.folder.manifest.total = len(model.spec.sublayers) + 1
    ids, texts = _rows(run)
    head_is_open = not run.folder.valid(HEAD_FILE)
    choice = read_choice(run.inputs["allocate"])
    work = Quantizing(run, model.spec, len(ids), choice, texts)
    ids = torch.cat([ids, *(texts or {}).values()])
    states = walk(run, model, ids, work, to_end=head_is_open)
    if states is not None:
        made_to_fit(partial(work.head, model, states))
    total = run.folder.manifest.total
    run.tick(total, total, "lm_head")


def _rows(run: StageRun[RunOptions]) -> tuple[torch.Tensor, Texts | None]:
    """Return the rows to round for, int64 (rows, t), and the texts that judge trained blocks.

    What judges a training is in no Hessian.
    """
    config, folder = run.config, run.inputs["tokenize"]
    if not config.judges:
        return load_rows(folder, "quantize"), None
    ids = unjudged_rows(folder, "quantize", config.held_out)
    return ids, judging_texts(folder, config.held_out) if config.rounding.block_steps else None


def needs(config: RunOptions, sizes: ModelSizes, *, corrects: bool = True) -> Need:
    """Forecast a stage whose work is `MatrixWork`.

    At the start the states exist twice, as rows and as one tensor, beside embedding and head.
    Corrected targets need some states of the source, too.
    """
    rows, tokens = config.calibration.rows, config.calibration.row_tokens
    trains = config.rounding.block_steps > 0
    walked = rows + (JUDGING_ROWS if trains else 0)
    paired = 0
    if corrects:
        paired = walked if trains else len(paired_rows(rows)) * (config.rounding.correction > 0)
    states = sizes.token * tokens * (walked + paired)
    weight = SUBLAYER_WEIGHT + (CORRECTED_WEIGHT if paired else 0)
    trained = largest_trained(sizes, tokens) if trains else 0
    working = max(sizes.walk_memory(sizes.worked_on(weight), tokens), trained)
    work = sizes.gpu_work(tokens, weight=35, square=5 * FLOAT) + sizes.together(1)
    work = max(work, trained)
    return Need(
        memory_bytes=states + max(states + 2 * FLOAT * sizes.head, working),
        kept_bytes=sizes.packed,
        passing_bytes=STATE_FILES * states,
        holds="sublayer",
        **sizes.on_gpu(work, states),
    )


def largest_trained(sizes: ModelSizes, tokens: int) -> int:
    """Return the bytes for the largest sublayer that is trained."""
    spec, limit = sizes.spec, sizes.card.memory if sizes.card else None
    trained = [s for s in spec.sublayers if trains_within(limit, spec, s, tokens)]
    return max((block_bytes(spec, s, tokens, limit) for s in trained), default=0)


def _options(config: RunOptions) -> dict[str, object]:
    options = {"rope": config.rope.model_dump(), "rounding": config.rounding.fingerprinted()}
    return options | ({"held_out_rows": config.held_out} if config.judges else {})


QUANTIZE: Stage[RunOptions] = Stage(
    name="quantize",
    schema=7,
    inputs=("tokenize", "sensitivity", "allocate"),
    options=_options,
    run=quantize,
    gpu_options=lambda config: effect_of_limit(config, config.calibration.row_tokens),
    needs=needs,
    removable=True,
)
