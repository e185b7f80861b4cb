"""`exl2flow inspect`: the contents of an EXL2 model, layer by layer."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl2flow.core import words
from exl2flow.flows.cli.console import emit_json, say, show
from exl2flow.flows.cli.tables import cost_table, plan_table, table_of

if TYPE_CHECKING:
    from exl2flow.inference.report.inspection import ModelContents

EXAMPLES = (
    "Examples:",
    "exl2flow inspect ./Llama-3.2-1B-4.0bpw",
    "exl2flow inspect ./from-elsewhere-exl2 --matrices",
    "exl2flow inspect ./Llama-3.2-1B-4.0bpw --json | jq .bpw",
    "exl2flow inspect ./Llama-3.2-1B-4.0bpw --csv matrices.csv",
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
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Also write the matrices as CSV, a row each."),
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option("--parquet", metavar="FILE", help="Also write the matrices as Parquet."),
    ] = None,
) -> None:
    """Show bits per weight, bit widths, groups, sizes and errors of an EXL2 model.

    Bits per weight count everything stored for a matrix: codes, scales, group table, permutation.
    Relative errors are those of a sublayer's or a matrix's output. The cost is the KL divergence
    from the source that the error of a matrix alone causes. Both are known for models that exl2flow
    converted.
    """
    from exl2flow.inference.report.inspection import inspect_model

    contents = inspect_model(model)
    _write_matrices(contents, csv, parquet)
    if as_json:
        emit_json(contents.to_json())
        return
    show(plan_table(_summary(contents)))
    show(table_of(_matrix_rows(contents) if matrices else _part_rows(contents)))
    costly = cost_table(contents.matrices)
    if costly is not None and not matrices:
        show(costly)


def _write_matrices(contents: "ModelContents", csv: Path | None, parquet: Path | None) -> None:
    """Write the table of matrices to these files.

    Raises:
        WriteFailed: a file cannot be written.
    """
    if csv is None and parquet is None:
        return
    from exl2flow.core.store.files import replacing  # this and the frames import pandas and torch
    from exl2flow.inference.report.frames import allocation_frame

    frame = allocation_frame(contents)
    if csv is not None:
        with replacing(csv) as file:
            file.write(frame.to_csv(index=False).encode())
        say(f"matrices {csv}")
    if parquet is not None:
        with replacing(parquet) as file:
            file.write(frame.to_parquet(index=False))
        say(f"matrices {parquet}")


def _summary(contents: "ModelContents") -> list[tuple[str, str]]:
    declared = contents.declared
    quantized = sum(part.bits for part in contents.parts) // 8
    stated = f", stated {declared['bits']}" if "bits" in declared else ""
    return [
        ("model", str(contents.folder)),
        ("architecture", contents.architecture or "unknown"),
        ("bits per weight", f"{words.bits(contents.bpw)} in the layers{stated}"),
        (
            "quantized",
            f"{sum(p.numel for p in contents.parts) / 1e6:.1f} M weights, {words.size(quantized)}",
        ),
        ("other tensors", words.size(contents.plain_bytes)),
        ("files", words.size(contents.file_bytes)),
        *_divergence(contents),
    ]


def _divergence(contents: "ModelContents") -> list[tuple[str, str]]:
    """Return the measured and the estimated KL divergence, if known."""
    record = contents.record
    if record is None:
        return []
    lines = [
        f"{words.divergence(score['kl_divergence'])} nats on {score['tokens']:,} {text} tokens"
        for text, score in (("held-out", record.score), ("calibration", record.calibration))
        if score is not None and score.keys() >= {"kl_divergence", "tokens"}
    ]
    if record.predicted_kl is not None:
        when = " before tuning" if record.is_tuned else ""
        lines.append(f"{words.divergence(record.predicted_kl)} estimated, sum over matrices{when}")
    if record.allocated_kl is not None:
        lines.append(f"{words.divergence(record.allocated_kl)} expected when bits were allotted")
    return [("" if index else "KL divergence", line) for index, line in enumerate(lines)]


def _listed(values: Iterable[int]) -> str:
    return "/".join(map(str, values))


def _part_rows(contents: "ModelContents") -> list[dict[str, str]]:
    """Return a row per sublayer, and the head."""
    return [
        {
            "sublayer": words.short(part.name),
            "bits per weight": words.bits(part.bpw),
            "bit widths": _listed(part.bit_widths),
            "group sizes": _listed(part.group_sizes),
            "size": words.size(part.bits / 8),
            "cost (nats)": words.cost(part.nats),
            "relative error": words.error(part.rel_err),
        }
        for part in contents.parts
    ]


def _matrix_rows(contents: "ModelContents") -> list[dict[str, str]]:
    """Return a row per matrix; bit widths with the share of in-features that have them."""
    return [
        {
            "matrix": words.short(matrix.key),
            "bits per weight": words.bits(matrix.bpw),
            "bit widths": " ".join(
                f"{bits}:{rows / matrix.shape[0]:.0%}" for bits, rows in matrix.rows.items()
            ),
            "group sizes": _listed(matrix.group_sizes),
            "cost (nats)": words.cost(matrix.nats),
            "relative error": words.error(matrix.rel_err),
        }
        for matrix in contents.matrices
    ]
