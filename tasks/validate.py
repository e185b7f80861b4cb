"""Show validation on the run's page: the report, with its plot."""

from collections.abc import Mapping
from typing import Any

from exl2flow.core.files import read_json
from exl2flow.core.stage import Pipeline
from exl2flow.inference.validate.stage import MARKDOWN_FILE, PLOT_FILE, REPORT_FILE
from exl2flow.tasks.artifacts import Artifacts, markdown_plot

SECTION = "\n## "


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish the report as one self-contained page, the plot before its first section."""
    folder = pipeline.path("validate")
    text = (folder / MARKDOWN_FILE).read_text(encoding="utf-8")
    svg = (folder / PLOT_FILE).read_text(encoding="utf-8")
    figures, section, rest = text.partition(SECTION)
    plot = markdown_plot(svg, "bits and errors by sublayer")
    score = read_json(folder / REPORT_FILE)["score"]
    page = f"{figures}\n{plot}\n{section}{rest}"
    artifacts.markdown("report", page, f"Validation: {_brief(score)}")


def _brief(score: Mapping[str, Any]) -> str:
    return (
        f"KL divergence {score['kl_divergence']:.5f} nats, perplexity {score['perplexity']:.3f} "
        f"({score['reference_perplexity']:.3f} of the source)"
    )
