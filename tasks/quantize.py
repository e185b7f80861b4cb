"""Show quantization on the run's page: errors of sublayers, and the cost of every matrix."""

from collections.abc import Mapping, Sequence
from typing import Any

from exl2flow.core.files import read_json
from exl2flow.core.stage import Pipeline
from exl2flow.inference.report.costs import MatrixCost, matrix_costs, share, total_nats
from exl2flow.inference.report.plots import Measured, render_errors
from exl2flow.model import ModelSpec, resolve
from exl2flow.quant.allocate.budget import ALLOCATION_FILE
from exl2flow.quant.quantize.stage import read_report, result_files
from exl2flow.tasks.artifacts import UNKNOWN, Artifacts, Row, fixed, markdown_plot, markdown_table

Report = Mapping[str, Any]  # of a sublayer or the head, as `quantize` wrote it


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish a page with a table and plot of sublayer errors, and a table of all matrices."""
    folder = pipeline.path("quantize")
    spec = resolve(pipeline.config.source)
    reports = [read_report(folder / name) for name in result_files(spec)]
    chosen = read_json(pipeline.path("allocate") / ALLOCATION_FILE)["choice"]
    total = total_nats(matrix_costs(reports))
    estimate = "" if total is None else f", estimated KL divergence {fixed(total, 5)} nats"
    page = errors_page(reports, measured_of(spec, chosen))
    artifacts.markdown("errors", page, f"Errors of sublayers{estimate}")
    rows = matrix_rows(matrix_costs(reports))
    artifacts.table("matrices", rows, "Errors of matrices, and the cost of each")


def measured_of(spec: ModelSpec, chosen: Mapping[str, Mapping[str, Any]]) -> Measured:
    """Return the measured values of the chosen candidates, by sublayer name.

    Args:
        spec: the model.
        chosen: slot (a matrix or a sublayer) → entry of the measurement.
    """
    keys = {s.name: [p.key for p in s.projections] for s in spec.sublayers}
    keys[spec.head.key] = [spec.head.key]
    known = {key: entry["nats"] for key, entry in chosen.items() if "nats" in entry}
    complete = {name: found for name, found in keys.items() if known.keys() >= set(found)}
    errors = {s.name: chosen[s.name] for s in spec.sublayers if s.name in chosen}
    return Measured(
        nats={name: sum(map(known.__getitem__, found)) for name, found in complete.items()},
        rel_err={name: 1 - entry["accuracy"] for name, entry in errors.items()},
    )


def errors_page(reports: Sequence[Report], measured: Measured) -> str:
    """Return the plot and the table of sublayers, as Markdown."""
    plot = markdown_plot(render_errors(reports, measured), "bits and errors by sublayer")
    return (
        f"{plot}\n\n"
        "Relative errors are those of a sublayer's output; costs are the KL divergence that each "
        "error alone is estimated to cause. Measured values are known before bit allocation.\n\n"
        f"{markdown_table(sublayer_rows(reports, measured))}\n"
    )


def sublayer_rows(reports: Sequence[Report], measured: Measured) -> list[Row]:
    """Return one row per report, all with the same columns: those with any known value."""
    is_priced = total_nats(matrix_costs(reports)) is not None
    return [_sublayer_row(report, measured, is_priced=is_priced) for report in reports]


def _sublayer_row(report: Report, measured: Measured, *, is_priced: bool) -> Row:
    name = str(report["name"])
    row: Row = {
        "sublayer": name.removeprefix("model.layers."),
        "bits per weight": fixed(report["bpw"], 3),
        "relative error": fixed(report["rel_err"], 5),
    }
    if measured.rel_err:
        row["measured error"] = fixed(measured.rel_err.get(name), 5)
    if is_priced:
        row["cost (nats)"] = fixed(total_nats(matrix_costs([report])), 6)
    if measured.nats:
        row["measured cost"] = fixed(measured.nats.get(name), 6)
    return row


def matrix_rows(costs: Sequence[MatrixCost]) -> list[Row]:
    """Return one row per matrix, in model order."""
    total = total_nats(costs)
    return [_matrix_row(cost, share(cost, total)) for cost in costs]


def _matrix_row(cost: MatrixCost, part: float | None) -> Row:
    return {
        "matrix": cost.key,
        "bits per weight": fixed(cost.bpw, 3),
        "relative error": fixed(cost.rel_err, 5),
        "cost (nats)": fixed(cost.nats, 6),
        "share of all": UNKNOWN if part is None else f"{100 * part:.1f} %",
    }
