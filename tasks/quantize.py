"""Errors of sublayers and costs of matrices, on the page of a run."""

from collections.abc import Sequence

from exl2flow.core import words
from exl2flow.core.reports import AllocationReport, SublayerReport, matrices_of, total_nats
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import Pipeline
from exl2flow.inference.report.blocks import by_block
from exl2flow.inference.report.costs import dominant
from exl2flow.inference.report.plots import Measured, render_errors
from exl2flow.inference.report.tables import Row, cost_rows, markdown_table, sublayer_row
from exl2flow.model import ModelSpec, resolve
from exl2flow.quant.allocate.budget import ALLOCATION_FILE
from exl2flow.quant.quantize.matrix_work import read_report, result_files
from exl2flow.tasks.artifacts import MOST_ROWS, Artifacts, markdown_plot


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish a page with a table and plot of sublayer errors, and a table of matrices."""
    folder = pipeline.path("quantize")
    spec = resolve(pipeline.config.source)
    reports = [read_report(folder / name) for name in result_files(spec)]
    allocation = AllocationReport.from_json(read_json(pipeline.path("allocate") / ALLOCATION_FILE))
    costs = matrices_of(reports)
    total = total_nats(costs)
    estimate = "" if total is None else f", estimated KL divergence {words.divergence(total)} nats"
    page = errors_page(reports, measured_of(spec, allocation))
    artifacts.markdown("errors", page, f"Errors of sublayers{estimate}")
    listed = costs if len(costs) <= MOST_ROWS else dominant(costs, MOST_ROWS)
    what = "every matrix" if len(listed) == len(costs) else f"the {MOST_ROWS:,} costliest matrices"
    artifacts.table("matrices", cost_rows(listed, total), f"Error and cost of {what}")


def measured_of(spec: ModelSpec, allocation: AllocationReport) -> Measured:
    """Return what measurement found for the chosen candidates, by sublayer or layer's experts."""
    keys: dict[str, list[str]] = {}
    for sublayer in spec.sublayers:
        keys.setdefault(sublayer.block, []).extend(p.key for p in sublayer.projections)
    keys[spec.head.key] = [spec.head.key]
    known, accuracies = allocation.nats, allocation.accuracies
    complete = {name: slots for name, slots in keys.items() if known.keys() >= set(slots)}
    whole = [s for s in spec.sublayers if not s.is_paired]
    return Measured(
        nats={name: sum(map(known.__getitem__, slots)) for name, slots in complete.items()},
        rel_err={s.block: 1 - accuracies[s.name] for s in whole if s.name in accuracies},
    )


def errors_page(reports: Sequence[SublayerReport], measured: Measured) -> str:
    """Return the plot and the table of sublayers, as Markdown."""
    plot = markdown_plot(render_errors(reports, measured), "bits and errors by sublayer")
    return (
        f"{plot}\n\n"
        "Relative errors are those of a sublayer's output; costs estimate the KL divergence that "
        "each error causes alone. The measured values were known before bits were allotted.\n\n"
        f"{markdown_table(sublayer_rows(reports, measured))}\n"
    )


def sublayer_rows(reports: Sequence[SublayerReport], measured: Measured) -> list[Row]:
    """Return a row per sublayer and layer's experts; measurements have a column if any is known."""
    rows = []
    for report in by_block(reports):
        row = sublayer_row(report)
        if measured.nats:
            row["measured cost"] = words.cost(measured.nats.get(report.name))
        if measured.rel_err:
            row["measured error"] = words.error(measured.rel_err.get(report.name))
        rows.append(row)
    return rows
