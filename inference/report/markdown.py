"""A validation report for people, in Markdown: figures, which matrices matter, and all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from exl2flow.inference.report.costs import (
    MatrixCost,
    concentration,
    dominant,
    matrix_costs,
    share,
    total_nats,
)

Report = Mapping[str, Any]  # the content of report.json

MOST_COSTLY = 10  # matrices that the report lists by themselves
UNKNOWN = "–"


def render_markdown(report: Report) -> str:
    """Return the report as Markdown."""
    score = report["score"]
    costs = matrix_costs(report["layers"])
    lines = [
        f"# {report['source'].rpartition('/')[2]} at {report['bpw']:.3f} bits per weight",
        "",
        _verdict(report),
        "",
        "| | source | converted |",
        "|---|---|---|",
        f"| perplexity | {score['reference_perplexity']:.4f} | {score['perplexity']:.4f} |",
        *_calibration_row(report),
        f"| KL divergence, mean (nats) | | {score['kl_divergence']:.5f} |",
        *_other_divergences(report),
        f"| KL divergence, median | | {score['kl_median']:.5f} |",
        f"| KL divergence, 99 % | | {score['kl_p99']:.5f} |",
        f"| top-1 agreement | | {score['top1_agreement']:.4f} |",
        f"| bytes of weights | {report['source_bytes']:,} | {score['bytes']:,} |",
        "",
        f"Measured on {score['tokens']:,} tokens. The model lies in `{report['model']}`.",
        *_calibration_rows(report),
        *_tuning(report),
        *_costly(costs),
        "",
        "## Bits and errors",
        *_tables(report["layers"], costs),
    ]
    if report["sample"]:
        quoted = "\n".join(f"> {line}" for line in report["sample"].splitlines())
        lines += ["", "## Sample", "", quoted]
    return "\n".join(lines) + "\n"


def _verdict(report: Report) -> str:
    if report["failures"]:
        return "**Failed:** " + "; ".join(report["failures"])
    if report["warnings"]:
        return "**Passed with warnings:** " + "; ".join(report["warnings"])
    return "**Passed.**"


def _calibration_row(report: Report) -> list[str]:
    calibration = report["calibration"]
    if calibration is None:
        return []
    source, found = calibration["reference_perplexity"], calibration["perplexity"]
    return [f"| perplexity, calibration text | {source:.4f} | {found:.4f} |"]


def _other_divergences(report: Report) -> list[str]:
    """Return the divergence on the calibration text, and the estimate, which is for that text."""
    calibration, predicted = report["calibration"], report.get("predicted_kl")
    found = {
        "mean on calibration text": calibration and calibration["kl_divergence"],
        "estimated, sum over matrices": predicted,
    }
    return [
        f"| KL divergence, {what} | | {value:.5f} |"
        for what, value in found.items()
        if value is not None
    ]


def _calibration_rows(report: Report) -> list[str]:
    """Return a sentence on what the rows of quantization are made of."""
    described = report.get("calibration_rows")
    if not described:
        return []
    rows = described["quantize"]
    kinds = ", ".join(f"{kind} {count}" for kind, count in rows["kinds"].items())
    total = sum(rows["kinds"].values())
    lines = ["", f"Calibrated on {total} rows of `{described['dataset']}`: {kinds}."]
    return lines + [f"Note: {note}." for note in rows["notes"]]


def _tuning(report: Report) -> list[str]:
    """Return a sentence on what distillation brought."""
    tuning = report.get("tuning")
    if not tuning:
        return []
    return [
        "",
        f"Tuned in {tuning['steps']} steps: KL divergence on calibration rows set aside "
        f"{tuning['first_kl']:.5f} → {tuning['best_kl']:.5f}. "
        "Estimates and errors below are those before tuning.",
    ]


def _costly(costs: Sequence[MatrixCost]) -> list[str]:
    """Return the table of the matrices that cost most, if costs are known."""
    total = total_nats(costs)
    if not total:
        return []
    return [
        "",
        "## Where the divergence comes from",
        "",
        f"{concentration(costs)}. It adds up what each matrix's error costs alone, on the "
        "calibration text.",
        "",
        "| matrix | parameters | bits per weight | estimated nats | share | relative error |",
        "|---|---|---|---|---|---|",
        *(
            f"| {_short(cost.key)} | {cost.params} | {_fixed(cost.bpw, 3)} | {_nats(cost.nats)} "
            f"| {100 * (share(cost, total) or 0):.1f} % | {_fixed(cost.rel_err, 5)} |"
            for cost in dominant(costs, MOST_COSTLY)
        ),
    ]


def _tables(layers: Sequence[Mapping[str, Any]], costs: Sequence[MatrixCost]) -> list[str]:
    """Return a table for all sublayers that have the same projections, a column for each."""
    members: dict[str, list[MatrixCost]] = {str(layer["name"]): [] for layer in layers}
    for cost in costs:
        members[cost.sublayer].append(cost)
    kinds: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for layer in layers:
        names = tuple(cost.name for cost in members[str(layer["name"])])
        kinds.setdefault(names if len(names) > 1 else (), []).append(layer)
    lines = []
    if any(kinds):
        lines += ["", "Of each matrix: bits per weight · estimated nats · relative error."]
    for names, found in kinds.items():
        columns = ("sublayer", "bits per weight", "estimated nats", "relative error", *names)
        lines += ["", _row(columns), _row(["---"] * len(columns))]
        lines += [_layer_row(layer, members[str(layer["name"])], names) for layer in found]
    return lines


def _layer_row(
    layer: Mapping[str, Any], members: Sequence[MatrixCost], names: tuple[str, ...]
) -> str:
    cells = [f"{_fixed(m.bpw, 2)} · {_nats(m.nats)} · {_fixed(m.rel_err, 3)}" for m in members]
    return _row(
        [
            _short(str(layer["name"])),
            f"{layer['bpw']:.3f}",
            _nats(total_nats(members)),
            f"{layer['rel_err']:.5f}",
            *(cells if names else ()),
        ]
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _short(key: str) -> str:
    return key.removeprefix("model.layers.")


def _fixed(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _nats(value: float | None) -> str:
    """Return a cost, which may be very small, with its first two digits."""
    return UNKNOWN if value is None else f"{value:#.2g}"
