"""`exl2flow inspect`: the contents of an EXL2 model, layer by layer."""

from pathlib import Path
from typing import Annotated

import typer

from exl2flow.cli.options import local
from exl2flow.cli.output.console import emit_json

EXAMPLES = (
    "exl2flow inspect ./Llama-3.2-1B-4.0bpw",
    "exl2flow inspect ./from-elsewhere-exl2 --matrices",
    "exl2flow inspect ./Llama-3.2-1B-4.0bpw --json | jq .bpw",
    "exl2flow inspect ./Llama-3.2-1B-4.0bpw --csv matrices.csv",
)


def inspect_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Folder of an EXL2 model, whatever wrote it, or its name on the Hub: org/name, "
            "org/name:4.0 (bits).",
        ),
    ],
    *,
    matrices: Annotated[
        bool, typer.Option("--matrices", help="List every matrix instead of sums per sublayer.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, matrices included.")
    ] = False,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the matrices as CSV, a row each."),
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the matrices as Parquet.")
    ] = None,
) -> None:
    """Show bits per weight, bit widths, groups, sizes and errors of an EXL2 model.

    Bits per weight count everything stored for a matrix: codes, scales, group table, permutation.
    Relative errors are those of a sublayer's or a matrix's output. The cost is the KL divergence
    from the source that the error of a matrix alone causes. Both are known for models that exl2flow
    converted.
    """
    from exl2flow.cli.output.results import show_contents, write_matrices  # these import torch
    from exl2flow.inference.report.inspection import inspect_model

    contents = inspect_model(local(model, plain=as_json))
    write_matrices(contents, csv, parquet)
    if as_json:
        emit_json(contents.to_json())
    else:
        show_contents(contents, matrices=matrices)
