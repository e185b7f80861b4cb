"""The validation report in Markdown: figures, the most costly matrices, all matrices."""

from collections.abc import Sequence

from exl2flow.core import words
from exl2flow.core.reports import MatrixReport, Report, SublayerReport, matrices_of, total_nats
from exl2flow.inference.report.blocks import by_block, by_role
from exl2flow.inference.report.costs import concentration, dominant
from exl2flow.inference.report.experts import (
    coverage_in_words,
    expert_rows,
    mean_changed_routes,
    never_routed,
)
from exl2flow.inference.report.tables import (
    cost_rows,
    markdown_table,
    report_rows_in_words,
    score_rows,
    sublayer_row,
)

MOST_COSTLY = 10  # matrices that the report lists by themselves


def render_markdown(report: Report) -> str:
    """Return the report as Markdown."""
    title = f"{report.source.rpartition('/')[2]} at {words.bits(report.bpw)} bits per weight"
    lines = [
        f"# {title}",
        "",
        _verdict(report),
        "",
        markdown_table(score_rows(report)),
        "",
        f"Certainty: {report_rows_in_words(report)}.",
        "",
        f"The model is in `{report.model}`.",
        *_preference(report),
        *_not_quantized(report),
        *_block(report),
        *_calibration_rows(report),
        *_tuning(report),
        *_costly(matrices_of(report.layers)),
        *_experts(report),
        "",
        "## Bits and errors",
        *_tables(by_block(report.layers)),
    ]
    if report.sample:
        quoted = "\n".join(f"> {line}" for line in report.sample.splitlines())
        lines += ["", "## Sample", "", quoted]
    return "\n".join(lines) + "\n"


def _verdict(report: Report) -> str:
    if report.failures:
        return "**Failed:** " + "; ".join(report.failures)
    if report.warnings:
        return "**Passed with warnings:** " + "; ".join(report.warnings)
    return "**Passed.**"


def _preference(report: Report) -> list[str]:
    """Say that the allocation preferred speed, if it did."""
    if report.prefer != "speed":
        return []
    return ["", "Speed was preferred: the layers' matrices only have groups of 128 rows."]


def _not_quantized(report: Report) -> list[str]:
    """Describe the tensors that are stored as in the source."""
    apart = report.not_quantized
    if apart is None:
        return []
    held = f"{apart.tensors} tensors, {words.size(apart.bytes or 0)}"
    return ["", f"Not quantized, as in the source: {apart.parts} ({held})."]


def _block(report: Report) -> list[str]:
    """Give the bitrate of a block that drafts tokens."""
    if report.block_bpw is None:
        return []
    bits = words.bits(report.block_bpw)
    return ["", f"The block that drafts tokens (MTP) has {bits} bits per weight, counted apart."]


def _calibration_rows(report: Report) -> list[str]:
    """Describe the rows that quantization was calibrated on."""
    rows = report.calibration_rows
    if rows is None:
        return []
    kinds = ", ".join(f"{kind} {count}" for kind, count in rows.kinds.items())
    total = sum(rows.kinds.values())
    lines = ["", f"Calibrated on {total} rows of `{rows.dataset}`: {kinds}."]
    return lines + [f"Note: {note}." for note in rows.notes]


def _tuning(report: Report) -> list[str]:
    """Describe the gain of distillation."""
    tuning = report.tuning
    if tuning is None:
        return []
    texts = tuning.texts or {"calibration": (tuning.first_kl, tuning.best_kl)}
    changes = ", ".join(
        f"{text} {words.divergence(first)} → {words.divergence(best)}"
        for text, (first, best) in texts.items()
    )
    lines = [
        "",
        f"Tuned in {tuning.steps} steps: KL divergence on held-back rows by text: {changes}. "
        "Estimates and errors below are from before tuning.",
    ]
    return lines + ([f"A lower divergence was {tuning.refused}."] if tuning.refused else [])


def _costly(costs: Sequence[MatrixReport]) -> list[str]:
    """Return the table of the matrices that cost most, if costs are known."""
    total = total_nats(costs)
    if not total:
        return []
    return [
        "",
        "## Where the divergence comes from",
        "",
        f"{concentration(costs)}, which adds up what the error of each matrix alone costs on the "
        "calibration text.",
        "",
        markdown_table(cost_rows(dominant(costs, MOST_COSTLY), total)),
    ]


def _experts(report: Report) -> list[str]:
    """Return the tokens of experts by layer, if there are any."""
    layers = report.experts.layers
    if not layers:
        return []
    changed, unused = mean_changed_routes(layers), never_routed(layers)
    lines = ["", "## Experts", "", f"{coverage_in_words(layers)}."]
    if changed is not None:
        lines.append(
            f"{words.percent(changed)} of the choices of experts differ from the source's, "
            "mean over the layers."
        )
    if unused:
        lines += ["", f"Never routed: {unused}."]
    return [*lines, "", markdown_table(expert_rows(layers))]


def _tables(blocks: Sequence[SublayerReport]) -> list[str]:
    """Return a table per kind of sublayer, with a column for each of its roles."""
    kinds: dict[tuple[str, ...], list[dict[str, str]]] = {}
    has_experts = False
    for block in blocks:
        roles, row = by_role(block.matrices), sublayer_row(block)
        names = tuple(roles) if len(block.matrices) > 1 else ()
        cells = {name: _role_cell(roles[name]) for name in names}
        has_experts = has_experts or len(roles) < len(block.matrices)
        kinds.setdefault(names, []).append(row | cells)
    lines = []
    if any(kinds):
        lines += ["", "For each matrix: bits per weight · cost (nats) · relative error."]
    if has_experts:
        lines.append(
            "For the experts of a layer: mean (least to most), their costs added up; "
            "`report.json` has every matrix."
        )
    for rows in kinds.values():
        lines += ["", markdown_table(rows)]
    return lines


def _role_cell(matrices: Sequence[MatrixReport]) -> str:
    """Return the figures of a matrix, or of all that have one role."""
    nats = words.cost(total_nats(matrices))
    bits = words.spread([matrix.bpw for matrix in matrices], words.bits)
    errors = words.spread([matrix.rel_err for matrix in matrices], words.error)
    return " · ".join((bits, nats, errors))
