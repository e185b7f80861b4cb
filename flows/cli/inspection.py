"""`exl2flow inspect`: what an EXL2 model holds, layer by layer."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from exl2flow.flows.cli.console import emit_json, show
from exl2flow.flows.cli.tables import cost_table, plan_table
from exl2flow.flows.cli.wording import brief, number, short, size

if TYPE_CHECKING:
    from exl2flow.inference.report.inspection import ModelContents

EXAMPLES = (
    "Examples:",
    "exl2flow inspect ./Llama-3.2-1B-4.0bpw",
    "exl2flow inspect ./from-elsewhere-exl2 --matrices",
    "exl2flow inspect ./Llama-3.2-1B-4.0bpw --json | jq .bpw",
)


def inspect_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Folder of an EXL2 model, whatever wrote it.", show_default=False
        ),
    ],
    *,
    matrices: Annotated[
        bool, typer.Option("--matrices", help="List every matrix instead of sums per sublayer.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, matrices included.")
    ] = False,
) -> None:
    """Show bits per weight, bit widths, groups, sizes and errors of an EXL2 model.

    Bits per weight count everything stored for a matrix: codes, scales, group table, permutation.
    Errors are relative errors of a sublayer's output. Nats are what the error of a matrix costs
    alone, in KL divergence from the source. Both are known for models that exl2flow converted.
    """
    from exl2flow.inference.report.inspection import inspect_model

    contents = inspect_model(model)
    if as_json:
        emit_json(contents.to_json())
        return
    show(plan_table(_summary(contents)))
    show(_matrix_table(contents) if matrices else _part_table(contents))
    costly = cost_table(contents.matrices)
    if costly is not None and not matrices:
        show(costly)


def _summary(contents: "ModelContents") -> list[tuple[str, str]]:
    declared = contents.declared
    quantized = sum(part.bits for part in contents.parts) // 8
    stated = f", stated {declared['bits']}" if "bits" in declared else ""
    return [
        ("model", str(contents.folder)),
        ("architecture", contents.architecture or "unknown"),
        ("bits per weight", f"{contents.bpw:.4f} in the layers{stated}"),
        (
            "quantized",
            f"{sum(p.numel for p in contents.parts) / 1e6:.1f} M weights, {size(quantized)}",
        ),
        ("other tensors", size(contents.plain_bytes)),
        ("files", size(contents.file_bytes)),
        *_divergence(contents),
    ]


def _divergence(contents: "ModelContents") -> list[tuple[str, str]]:
    """Return the measured KL divergence and the estimated one, as far as they are known."""
    record = contents.record
    if record is None:
        return []
    lines = [
        f"{number(score['kl_divergence'], 5)} nats on {score['tokens']:,} {text} tokens"
        for text, score in (("held-out", record.score), ("calibration", record.calibration))
        if score is not None
    ]
    if record.predicted_kl is not None:
        when = " before tuning" if record.is_tuned else ""
        lines.append(f"{record.predicted_kl:.5f} estimated, sum over matrices{when}")
    if record.allocated_kl is not None:
        lines.append(f"{record.allocated_kl:.5f} expected when bits were allotted")
    return [("" if index else "KL divergence", line) for index, line in enumerate(lines)]


def _table(first: str, names: Sequence[str], *columns: str) -> Table:
    """Return an empty table whose first column holds names, which are never cut."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True, min_width=max(map(len, names)))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _listed(values: tuple[int, ...]) -> str:
    return "/".join(map(str, values))


def _part_table(contents: "ModelContents") -> Table:
    """Return one line per sublayer, and the head."""
    names = [short(part.name) for part in contents.parts]
    columns = ("bpw", "bit widths", "group sizes", "size", "nats", "error")
    table = _table("sublayer", names, *columns)
    for name, part in zip(names, contents.parts, strict=True):
        table.add_row(
            name,
            f"{part.bpw:.3f}",
            _listed(part.bit_widths),
            _listed(part.group_sizes),
            size(part.bits / 8),
            brief(part.nats),
            number(part.rel_err),
        )
    return table


def _matrix_table(contents: "ModelContents") -> Table:
    """Return one line per matrix; widths with the share of rows that have them."""
    names = [short(matrix.key) for matrix in contents.matrices]
    table = _table("matrix", names, "bpw", "bit widths", "group sizes", "nats", "error")
    for name, matrix in zip(names, contents.matrices, strict=True):
        shares = (f"{bits}:{rows / matrix.shape[0]:.0%}" for bits, rows in matrix.rows.items())
        table.add_row(
            name,
            f"{matrix.bpw:.3f}",
            " ".join(shares),
            _listed(matrix.group_sizes),
            brief(matrix.nats),
            number(matrix.rel_err),
        )
    return table
