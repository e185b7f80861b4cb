"""A validation report for people: Markdown with a table per layer, and a plot as SVG."""

import io
from collections.abc import Mapping
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

Report = Mapping[str, Any]  # the content of report.json


def render_markdown(report: Report) -> str:
    """Return the report as Markdown."""
    score = report["score"]
    lines = [
        f"# {report['source'].rpartition('/')[2]} at {report['bpw']:g} bits per weight",
        "",
        _verdict(report),
        "",
        "| | source | converted |",
        "|---|---|---|",
        f"| perplexity | {score['reference_perplexity']:.4f} | {score['perplexity']:.4f} |",
        *_calibration_row(report),
        f"| KL divergence, mean (nats) | | {score['kl_divergence']:.5f} |",
        f"| KL divergence, median | | {score['kl_median']:.5f} |",
        f"| KL divergence, 99 % | | {score['kl_p99']:.5f} |",
        f"| top-1 agreement | | {score['top1_agreement']:.4f} |",
        f"| bytes of weights | {report['source_bytes']:,} | {score['bytes']:,} |",
        "",
        f"Measured on {score['tokens']:,} tokens. The model lies in `{report['model']}`.",
        "",
        "## Bits and errors",
        "",
        "| sublayer | bits per weight | relative error |",
        "|---|---|---|",
        *(
            f"| {layer['name']} | {layer['bpw']:.3f} | {layer['rel_err']:.5f} |"
            for layer in report["layers"]
        ),
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


def render_plot(report: Report) -> str:
    """Return bits per weight (bars) and relative error (line) by sublayer, as SVG text."""
    layers = report["layers"]
    names = [layer["name"].removeprefix("model.layers.") for layer in layers]
    with rc_context({"svg.hashsalt": "exl2flow", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        bits = figure.add_subplot()
        bits.bar(range(len(layers)), [layer["bpw"] for layer in layers], color="#9db8d2")
        bits.set_ylabel("bits per weight")
        bits.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
        bits.set_xlim(-0.6, len(layers) - 0.4)
        errors = bits.twinx()
        errors.plot([layer["rel_err"] for layer in layers], "o-", color="#b5482f", markersize=3)
        errors.set_ylabel("relative error")
        errors.set_ylim(bottom=0)
        bits.set_title(f"KL divergence {report['score']['kl_divergence']:.4f} nats")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
