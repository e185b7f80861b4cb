"""The validation report with its plot, on the page of a run."""

from pathlib import Path

from exl2flow.core import words
from exl2flow.core.reports import Score
from exl2flow.core.store.stage import Pipeline
from exl2flow.inference.validate.stage import MARKDOWN_FILE, PLOT_FILE, report_in
from exl2flow.tasks.artifacts import Artifacts, markdown_plot

SECTION = "\n## "


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish the report as one self-contained page."""
    folder = pipeline.path("validate")
    score = report_in(folder).score
    artifacts.markdown("report", report_page(folder), f"Validation: {_brief(score)}")


def report_page(folder: Path) -> str:
    """Return the report in the stage's folder with its plot before the first section."""
    text = (folder / MARKDOWN_FILE).read_text(encoding="utf-8")
    svg = (folder / PLOT_FILE).read_text(encoding="utf-8")
    figures, section, rest = text.partition(SECTION)
    plot = markdown_plot(svg, "bits and errors by sublayer")
    return f"{figures}\n{plot}\n{section}{rest}"


def _brief(score: Score) -> str:
    return (
        f"KL divergence {words.divergence(score.kl_divergence)} nats, perplexity "
        f"{words.perplexity(score.perplexity)} "
        f"(source: {words.perplexity(score.reference_perplexity)})"
    )
