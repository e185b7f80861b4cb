"""Tasks of the flow `validate`: score models against a reference, and let them write a sample.

The page that shows both says whether more bytes bring a model closer to its source, and plots it.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from prefect import task

from exl2flow.core.config import ValidateOptions
from exl2flow.core.progress import Tick
from exl2flow.inference.evaluate import Score, evaluate
from exl2flow.inference.report.comparison import check_bitrates, compared
from exl2flow.inference.report.plots import render_comparison
from exl2flow.inference.report.tables import Row, bitrate_row, markdown_table, scored_on
from exl2flow.inference.text import text_rows
from exl2flow.inference.validate.stage import generate_sample
from exl2flow.model import Tokenizer, resolve
from exl2flow.tasks.artifacts import Artifacts, ProgressArtifact, markdown_plot


@task(name="score", task_run_name="score", persist_result=False)
def score_models(
    models: Sequence[Path], reference: Path | None, options: ValidateOptions, *, device: str
) -> list[Score]:
    """Score all models on the same rows; they share the reference's forward pass."""
    base = reference or models[0]
    ids = text_rows(
        options.text,
        Tokenizer.load(base),
        rows=options.rows,
        row_tokens=min(options.row_tokens, resolve(base).max_positions),
    )
    artifacts = Artifacts(base.resolve().name)
    with closing(ProgressArtifact(artifacts, "score")) as progress:
        return evaluate(
            models,
            ids,
            reference=reference,
            device=device,
            advance=lambda done, total, detail: progress(
                Tick(stage="score", done=done, total=total, detail=detail)
            ),
        )


@task(name="sample", task_run_name="sample {model.name}", persist_result=False)
def sample_text(model: Path, options: ValidateOptions, *, device: str) -> str:
    """Return the prompt and its seeded continuation by a model."""
    return generate_sample(model, options, device) if options.sample_tokens else ""


def publish_comparison(
    source: Path,
    title: str,
    scores: Sequence[Score],
    samples: Sequence[str],
    *,
    links: Mapping[str, str] | None = None,
) -> None:
    """Publish models of one source beside each other: a table, and a page with their plot.

    Args:
        source: the models' source, whose name the artifacts bear.
        title: what is compared.
        scores: of the models.
        samples: text that each of them wrote.
        links: name of a model's folder → where it is published.
    """
    if not scores:
        return
    artifacts = Artifacts(source.resolve().name)
    artifacts.table("bitrates", bitrate_rows(scores), f"All figures of `{title}`")
    page = comparison_page(scores, samples, links=links)
    artifacts.markdown("comparison", page, f"Figures, plot and samples of `{title}`")


def bitrate_rows(scores: Sequence[Score], links: Mapping[str, str] | None = None) -> list[Row]:
    """Return a row per model; `links` as in `comparison_page`."""
    rows = []
    for score, model in zip(scores, compared(scores), strict=True):
        url = (links or {}).get(Path(score.model).name)
        name = model.label if url is None else f"[{model.label}]({url})"
        rows.append({**bitrate_row(model, asdict(score)), "model": name})
    return rows


def comparison_page(
    scores: Sequence[Score],
    samples: Sequence[str],
    *,
    links: Mapping[str, str] | None = None,
) -> str:
    """Return what the bits brought, its plot, scores and samples, as Markdown.

    Args:
        scores: of the models.
        samples: text that each of them wrote; an empty one is not shown.
        links: name of a model's folder → where it is published.
    """
    models = compared(scores)
    sound, warnings = check_bitrates(models)
    lines = [f"{sound}.", ""] * bool(sound)
    lines += [line for text in warnings for line in (f"**Warning:** {text}.", "")]
    if any(model.kl for model in models):
        lines += [markdown_plot(render_comparison(models), "KL divergence and bits"), ""]
    lines += [markdown_table(bitrate_rows(scores, links)), "", f"{scored_on(asdict(scores[0]))}."]
    for model, sample in zip(models, samples, strict=True):
        if sample:
            quoted = "\n".join(f"> {line}" for line in sample.splitlines())
            lines += ["", f"## What {model.label} writes", "", quoted]
    lines += ["", "## Folders", "", *(f"- `{score.model}`" for score in scores)]
    return "\n".join(lines) + "\n"
