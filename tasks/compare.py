"""Tasks of the flow `validate`: score models against a reference, and let them write a sample.

The page that shows both says whether more bytes bring a model closer to its source, and plots it.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from prefect import task

from exl2flow.core.config import ValidateOptions
from exl2flow.core.progress import Tick
from exl2flow.inference.evaluate import Score, evaluate
from exl2flow.inference.report.comparison import MEGABYTE, Compared, check_bitrates, compared
from exl2flow.inference.report.plots import render_comparison
from exl2flow.inference.text import text_rows
from exl2flow.inference.validate.stage import generate_sample
from exl2flow.model import Tokenizer, resolve
from exl2flow.tasks.artifacts import (
    UNKNOWN,
    Artifacts,
    ProgressArtifact,
    Row,
    fixed,
    markdown_plot,
    markdown_table,
)


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
    rows = [comparison_row(s, m) for s, m in zip(scores, compared(scores), strict=True)]
    artifacts.table("bitrates", rows, f"All figures of `{title}`")
    page = comparison_page(scores, samples, links=links)
    artifacts.markdown("comparison", page, f"Figures, plot and samples of `{title}`")


def comparison_row(score: Score, model: Compared) -> Row:
    """Return a model's row of the table of all."""
    return {
        "model": model.label,
        "bits per weight": fixed(model.bpw, 3),
        "size (MB)": fixed(score.bytes / MEGABYTE, 2),
        "KL divergence": fixed(score.kl_divergence, 5),
        "estimated": fixed(model.predicted_kl, 5),
        "top-1 agreement": _percent(score.top1_agreement),
        "perplexity": fixed(score.perplexity, 4),
        "source's": fixed(score.reference_perplexity, 4),
    }


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
    pairs = list(zip(scores, models, strict=True))
    lines += [markdown_table([_page_row(score, model, links or {}) for score, model in pairs])]
    source = scores[0].reference_perplexity
    text = f"Measured on {scores[0].tokens:,} tokens; KL divergence in nats"
    lines += [
        "",
        f"{text}." if source is None else f"{text}, the source's perplexity {source:.4f}.",
    ]
    for model, sample in zip(models, samples, strict=True):
        if sample:
            quoted = "\n".join(f"> {line}" for line in sample.splitlines())
            lines += ["", f"## What {model.label} writes", "", quoted]
    lines += ["", "## Folders", "", *(f"- `{score.model}`" for score in scores)]
    return "\n".join(lines) + "\n"


def _page_row(score: Score, model: Compared, links: Mapping[str, str]) -> Row:
    """Return the part of a row that fits on a page, with a link if there is one."""
    url = links.get(Path(score.model).name)
    row = comparison_row(score, model)
    chosen = ("bits per weight", "size (MB)", "KL divergence", "top-1 agreement", "perplexity")
    name = model.label if url is None else f"[{model.label}]({url})"
    return {"model": name, **{column: row[column] for column in chosen}}


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.2f} %"
