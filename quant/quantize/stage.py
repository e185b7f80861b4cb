"""Quantize every sublayer with its chosen candidate, then the head.

States are those of the quantized model: each sublayer is rounded for the actual output of the
sublayers before it. One file per sublayer holds the stored tensors; its header holds the errors and
the digest of every reconstruction, which `compile` checks after writing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from exl2flow.core import words
from exl2flow.core.options.config import HELD_OUT_ROWS, RunOptions
from exl2flow.core.reports import MatrixReport, SublayerReport
from exl2flow.core.store.need import Need
from exl2flow.core.store.stage import Stage, StageRun
from exl2flow.kernels import get_ops, record_stream, run_concurrently, tensor_cores
from exl2flow.model import (
    Linear,
    ModelSpec,
    ProjectionSpec,
    Sublayer,
)
from exl2flow.quant.allocate.budget import read_choice
from exl2flow.quant.allocate.layout import Choice
from exl2flow.quant.quantize.correction import (
    Correction,
    CrossProducts,
    paired_rows,
)
from exl2flow.quant.quantize.dealt import deal_runs
from exl2flow.quant.quantize.matrix_work import (
    HEAD_FILE,
    MatrixWork,
    read_report,
    summary,
    trained_in_log,
)
from exl2flow.quant.quantize.routing import experts_in_log
from exl2flow.quant.quantize.stored_form import Packed, storing
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
    dealt_head_hessian,
)
from exl2flow.quant.rounding.together import factored_apart
from exl2flow.quant.sensitivity.fisher import Factors
from exl2flow.quant.tokenize.stage import judging_texts, load_rows, unjudged_rows
from exl2flow.quant.training.block import (
    Texts,
    block_bytes,
    trains_within,
)
from exl2flow.quant.walk.deal import Pairs
from exl2flow.quant.walk.limits import effect_of_limit
from exl2flow.quant.walk.needs import FLOAT, SUBLAYER_WEIGHT, ModelSizes
from exl2flow.quant.walk.pinned import made_to_fit
from exl2flow.quant.walk.source_model import SourceModel, device_of
from exl2flow.quant.walk.walk import STATE_FILES, Store, advance, walk

CORRECTED_WEIGHT = 8  # bytes per weight more: corrected targets, and one being computed
JUDGING_ROWS = 3 * HELD_OUT_ROWS  # at most, of all texts that judge


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
        walked = rows + self.rows - self.worked_on
        if texts is not None:
            self.pairs, self.again = Pairs(range(rows), self.deal), range(walked)
        elif self.options.correction:
            self.pairs, self.again = Pairs(paired_rows(rows), self.deal), paired_rows(rows)
        if self.here is not None:
            again = [place for place, row in enumerate(self.again) if row in self.here]
            self.here = [*self.here, *(walked + place for place in again)]
        self.correction = Correction(
            strength=self.options.correction, damping=self.options.damping, note=run.folder.note
        )

    def describe(self, path: Path) -> str:
        """See `SublayerWork`."""
        report = read_report(path)
        figures = f"bpw={words.bits(report.bpw)} rel_err={words.error(report.rel_err)}"
        return figures + trained_in_log(report) + experts_in_log(report)

    def compute(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> Store | None:
        """See `SublayerWork`: round, pack, and advance the states quantized."""
        quantized, twins = states[: self.rows], states[self.rows :]
        worked_on, paired = quantized[: self.worked_on], len(self.pairs.own)
        crosses = CrossProducts(sublayer, twins[:paired], self.pairs)
        coverage = Coverage.of(sublayer, worked_on, self.options.expert_tokens, self.deal)
        runs, owners = deal_runs(sublayer, self.deal.ranks)
        hessians, reference = collect_hessians(
            sublayer,
            worked_on,
            keep=self.error_rows,
            observe=crosses,
            coverage=coverage,
            deal=self.deal,
            owners=owners,
        )
        advance(sublayer, twins[paired:])
        source, targets = dict(sublayer.linears), dict(sublayer.linears)
        if self.options.correction:
            targets = self.correction.sublayer_targets(
                sublayer, worked_on, hessians, crosses, coverage, owners
            )
        factors = self.read_factors(sublayer.spec.index)
        rounded = self._round_sublayer(sublayer, targets, hessians, factors, runs)
        rounded, trained = self.trained(sublayer, rounded, factors, quantized, returned=twins)
        own = {
            p.name: self._packed(p, source[p.name], rounded[p.name], hessians[p.capture], factors)
            for p in sublayer.spec.projections
            if p.name in rounded
        }
        packed, errors = self.installed(sublayer, own, quantized, reference)
        crosses.gather()
        of_all = self.deal.ranks.gather(errors)
        if of_all is None:
            return None

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

        return storing(path, packed, {"errors": of_all}, finish)

    def head(self, model: SourceModel, states: torch.Tensor) -> None:
        """Quantize the head on the final states and commit its file; rank 0 rounds it."""
        projection, head = model.spec.head, model.head()
        quantized = states[: self.worked_on]
        source = states[self.rows :][: len(self.pairs.own)]
        hessian = dealt_head_hessian(head, quantized, self.deal)
        factors = self.read_factors("head") if hessian is not None else {}

        def target() -> Linear | None:
            if not self.options.correction:
                return head.linear
            paired = self.pairs.of(quantized)
            return self.correction.head_target(head, hessian, paired, source, self.pairs)

        # keep no reference to targets and weights, which are as large as the head
        linear = target()
        if hessian is None or linear is None:
            return
        jobs = [self._job(projection, linear, factors)]
        del linear
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
        runs: Sequence[Sequence[str]],
    ) -> dict[str, RoundedMatrix]:
        """Return projection → rounded matrix of some runs of captures.

        Readers of one activation are rounded together. Empties `targets`: each is as large as the
        sublayer's weights.
        """
        spec = sublayer.spec
        own = [p for run in runs for capture in run for p in spec.reading(capture)]
        jobs = {p.name: self._job(p, targets[p.name], factors) for p in own}
        targets.clear()

        def factored(run: Sequence[str]) -> list[HessianFactor]:
            firsts = [spec.reading(capture)[0] for capture in run]
            return self.factored(firsts, [hessians[capture] for capture in run], factors)

        def work(run: Sequence[str], found: list[HessianFactor]) -> dict[str, RoundedMatrix]:
            names = [p.name for capture in run for p in spec.reading(capture)]
            own = [jobs[name] for name in names]
            items = list(found) if found else factored(run)  # used if this runs a second time
            found.clear()
            round_run = self._round if len(run) == 1 else self._round_together
            return dict(zip(names, round_run(own, items), strict=True))

        rounded = dict[str, RoundedMatrix]()
        for some in factored_apart(spec, runs):
            works = [partial(work, run, factored(run)) for run in some]
            for part in run_concurrently(works, device_of(sublayer)):
                rounded |= part
        for matrix in rounded.values():
            record_stream(matrix.codes, matrix.scale_codes, matrix.max_scales)
        return rounded


@tensor_cores()
@torch.no_grad()
def quantize(run: StageRun[RunOptions]) -> None:
    """Write the stored tensors of every sublayer and of the head into the stage folder."""
    model = SourceModel.open(run.config, run.device, keeps_states=run.keeps_states)
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
        finish = partial(work.head, model, states)
        finish() if run.ranks.are_many else made_to_fit(finish)
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
    schema=9,
    inputs=("tokenize", "sensitivity", "allocate"),
    options=_options,
    run=quantize,
    gpu_options=lambda config: effect_of_limit(config, config.calibration.row_tokens),
    needs=needs,
    removable=True,
    is_dealt=lambda config: True,
)
