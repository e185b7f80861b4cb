"""Work on the matrices of each sublayer and of the head, which `quantize` and `refine` share."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from exl2flow.core.options.config import RunOptions
from exl2flow.core.reports import MatrixReport, SublayerReport
from exl2flow.core.runtime.memory import limit_of
from exl2flow.core.store.files import read_metadata, read_tensors
from exl2flow.core.store.stage import StageRun
from exl2flow.model import (
    ModelSpec,
    ProjectionSpec,
    Sublayer,
    SublayerSpec,
)
from exl2flow.model.files.exl2 import QuantizedMatrix
from exl2flow.quant.quantize.correction import (
    CrossProducts,
    advance_source,
)
from exl2flow.quant.quantize.dealt import of_all_ranks, shared_by_all
from exl2flow.quant.quantize.stored_form import Packed, install, storing
from exl2flow.quant.rounding.error_feedback import (
    RoundedMatrix,
)
from exl2flow.quant.rounding.hessian import (
    HessianFactor,
)
from exl2flow.quant.sensitivity.fisher import Factors, shared_factors
from exl2flow.quant.sensitivity.stage import FactorFiles
from exl2flow.quant.training.block import (
    BlockRows,
    Texts,
    corrected_output,
    output_metric_of,
    row_bytes,
    train_block,
    trains_within,
)
from exl2flow.quant.training.kept import kept_in
from exl2flow.quant.walk.deal import Deal, Pairs
from exl2flow.quant.walk.source_model import device_of, relative_distance
from exl2flow.quant.walk.walk import SublayerWork, advance
from exl2flow.quant.walk.working_memory import stored_elements

HEAD_FILE = "sublayers/head.safetensors"
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
        self.deal = Deal(rows, run.ranks)
        self.worked_on = len(self.deal.own)  # of this rank, as all that follow
        judging = range(rows, rows + sum(map(len, (texts or {}).values())))  # at all ranks
        self.rows = self.worked_on + len(judging)
        self.here = [*self.deal.own, *judging] if run.ranks.are_many else None
        self.pairs = Pairs(range(0), self.deal)  # rows of the source whose errors are corrected
        self.error_rows = range(0, rows, max(1, rows // ERROR_ROWS))
        factors = run.inputs.get("sensitivity")
        self.factors = factors and FactorFiles(factors, run.device)

    def file(self, sublayer: SublayerSpec) -> str:
        """See `SublayerWork`."""
        return sublayer_file(sublayer)

    def replay(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> None:
        """See `SublayerWork`: advance states through the matrices of an earlier run."""
        quantized, source = states[: self.rows], states[self.rows :]
        paired = len(self.pairs.own)
        pairs = CrossProducts(sublayer, source[:paired], self.pairs)
        advance_source(sublayer, pairs, quantized[: self.worked_on])
        advance(sublayer, source[paired:])
        tensors = read_tensors(path)
        for projection in sublayer.spec.projections:
            matrix = QuantizedMatrix.from_tensors(projection.key, tensors)
            install(sublayer, projection, matrix.to(device_of(sublayer)))
        self.advance(sublayer, quantized)

    def advance(self, sublayer: Sublayer, states: torch.Tensor) -> None:
        """Run the rows, and the texts that follow them, through a sublayer, in place."""
        advance(sublayer, states[: self.worked_on], self.deal)
        if len(states) > self.worked_on:
            advance(sublayer, states[self.worked_on :])

    def installed(
        self,
        sublayer: Sublayer,
        own: Mapping[str, Packed],
        states: torch.Tensor,
        reference: Mapping[int, torch.Tensor],
    ) -> tuple[list[Packed], torch.Tensor]:
        """Install the matrices of all ranks, and advance states through them, in place.

        Args:
            sublayer: with the source's weights.
            own: projection → matrix of this rank.
            states: that enter it, fp32 (rows, t, hidden).
            reference: row → what the source returns, of this rank's rows.

        Returns:
            All matrices, see `of_all_ranks`; and the errors of those rows, see `row_errors`.
        """
        packed = of_all_ranks(sublayer, own, self.deal.ranks)
        for item in packed:
            install(sublayer, item.projection, item.matrix)
        self.advance(sublayer, states)
        first = self.deal.own.start
        return packed, row_errors(sublayer, (states[row - first] for row in reference), reference)

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
            rounded: projection → matrix; those that this rank rounds.
            factors: of the projections, or empty.
            states: that enter it, fp32 (rows, t, hidden).
            returned: what the source's own have become, or None.
        """
        if self.texts is None:
            return rounded, None
        of_all = shared_by_all(rounded, self.deal.ranks)
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
            deal=self.deal,
            states=states,
            wanted=corrected_output(sublayer, returned, self.options.correction),
            metric=output_metric_of(sublayer, outputs),
            texts=self.texts,
            at_once=max(1, kept_in(limit) // row_bytes(self.spec, spec, tokens)),
        )
        trained, score = train_block(of_all, sublayer, rows, self.options)
        return {name: trained[name] for name in rounded}, score

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
    errors = [relative_distance(settled(row), settled(y)) for row, y in pairs]
    return torch.stack(errors) if errors else torch.zeros(0, device=device)
