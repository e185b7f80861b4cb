"""`exl2flow inspect`: what an EXL2 model holds, layer by layer."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from exl2flow.flows.cli.console import emit_json, show
from exl2flow.flows.cli.tables import plan_table
from exl2flow.flows.cli.wording import number, short, size

if TYPE_CHECKING:
    from exl2flow.inference.inspection import ModelContents

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
    Errors are relative errors of a sublayer's output, known for models that exl2flow converted.
    """
    from exl2flow.inference.inspection import inspect_model

    contents = inspect_model(model)
    if as_json:
        emit_json(contents.to_json())
        return
    show(plan_table(_summary(contents)))
    show(_matrix_table(contents) if matrices else _part_table(contents))


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
    ]


def _table(first: str) -> Table:
    table = Table(first, box=SIMPLE_HEAD, pad_edge=False)
    for name in ("bpw", "bit widths", "group sizes", "groups", "size", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _listed(values: tuple[int, ...]) -> str:
    return "/".join(map(str, values))


def _part_table(contents: "ModelContents") -> Table:
    """Return one line per sublayer, and the head."""
    table = _table("sublayer")
    for part in contents.parts:
        table.add_row(
            short(part.name),
            f"{part.bpw:.3f}",
            _listed(part.bit_widths),
            _listed(part.group_sizes),
            str(part.groups),
            size(part.bits / 8),
            number(part.rel_err),
        )
    return table


def _matrix_table(contents: "ModelContents") -> Table:
    """Return one line per matrix; widths with the share of rows that have them."""
    table = _table("matrix")
    for matrix in (m for part in contents.parts for m in part.matrices):
        shares = (f"{bits}:{rows / matrix.shape[0]:.0%}" for bits, rows in matrix.rows.items())
        table.add_row(
            short(matrix.key),
            f"{matrix.bits / matrix.numel:.3f}",
            " ".join(shares),
            _listed(matrix.group_sizes),
            str(matrix.groups),
            size(matrix.bits / 8),
            number(matrix.rel_err),
        )
    return table
