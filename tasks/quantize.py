"""Errors of sublayers and costs of matrices, on the page of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from exl2flow.core import words
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import Pipeline
from exl2flow.inference.report.blocks import by_block
from exl2flow.inference.report.costs import dominant, matrix_costs, total_nats
from exl2flow.inference.report.plots import Measured, render_errors
from exl2flow.inference.report.tables import Row, cost_rows, markdown_table, sublayer_row
from exl2flow.model import ModelSpec, resolve
from exl2flow.quant.allocate.budget import ALLOCATION_FILE
from exl2flow.quant.quantize.stage import read_report, result_files
from exl2flow.tasks.artifacts import MOST_ROWS, Artifacts, markdown_plot

Report = Mapping[str, Any]  # of a sublayer or the head, as `quantize` wrote it


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish a page with a table and plot of sublayer errors, and a table of matrices."""
    folder = pipeline.path("quantize")
    spec = resolve(pipeline.config.source)
    reports = [read_report(folder / name) for name in result_files(spec)]
    chosen = read_json(pipeline.path("allocate") / ALLOCATION_FILE)["choice"]
    costs = matrix_costs(reports)
    total = total_nats(costs)
    estimate = "" if total is None else f", estimated KL divergence {words.divergence(total)} nats"
    page = errors_page(reports, measured_of(spec, chosen))
    artifacts.markdown("errors", page, f"Errors of sublayers{estimate}")
    listed = costs if len(costs) <= MOST_ROWS else dominant(costs, MOST_ROWS)
    what = "every matrix" if len(listed) == len(costs) else f"the {MOST_ROWS:,} costliest matrices"
    artifacts.table("matrices", cost_rows(listed, total), f"Error and cost of {what}")


def measured_of(spec: ModelSpec, chosen: Mapping[str, Mapping[str, Any]]) -> Measured:
    """Return what measurement found for the chosen candidates, by sublayer or layer's experts.

    Args:
        spec: the model.
        chosen: slot (a matrix or a sublayer) → entry of the measurement.
    """
    keys: dict[str, list[str]] = {}
    for sublayer in spec.sublayers:
        keys.setdefault(sublayer.block, []).extend(p.key for p in sublayer.projections)
    keys[spec.head.key] = [spec.head.key]
    known = {key: entry["nats"] for key, entry in chosen.items() if "nats" in entry}
    complete = {name: slots for name, slots in keys.items() if known.keys() >= set(slots)}
    whole = [s for s in spec.sublayers if not s.is_paired]
    errors = {s.block: chosen[s.name] for s in whole if s.name in chosen}
    return Measured(
        nats={name: sum(map(known.__getitem__, slots)) for name, slots in complete.items()},
        rel_err={name: 1 - entry["accuracy"] for name, entry in errors.items()},
    )


def errors_page(reports: Sequence[Report], measured: Measured) -> str:
    """Return the plot and the table of sublayers, as Markdown."""
    plot = markdown_plot(render_errors(reports, measured), "bits and errors by sublayer")
    return (
        f"{plot}\n\n"
        "Relative errors are those of a sublayer's output; costs estimate the KL divergence that "
        "each error causes alone. The measured values were known before bits were allotted.\n\n"
        f"{markdown_table(sublayer_rows(reports, measured))}\n"
    )


def sublayer_rows(reports: Sequence[Report], measured: Measured) -> list[Row]:
    """Return a row per sublayer and layer's experts; measurements have a column if any is known."""
    rows = []
    for report in by_block(reports):
        name = str(report["name"])
        row = sublayer_row(name, matrix_costs([report]), report)
        if measured.nats:
            row["measured cost"] = words.cost(measured.nats.get(name))
        if measured.rel_err:
            row["measured error"] = words.error(measured.rel_err.get(name))
        rows.append(row)
    return rows
