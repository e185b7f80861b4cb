"""Tasks of the flow `validate`: score models against a reference, and let them write a sample.

The page that shows both says whether more bytes bring a model closer to its source, and plots it.
"""

import base64
from collections.abc import Sequence
from pathlib import Path

from prefect import task

from exl2flow.core.config import ValidateOptions
from exl2flow.core.progress import Tick
from exl2flow.inference.comparison import Compared, check_bitrates, compared
from exl2flow.inference.evaluate import Score, evaluate
from exl2flow.inference.plots import render_comparison
from exl2flow.inference.text import text_rows
from exl2flow.inference.validate import generate_sample
from exl2flow.model import Tokenizer, resolve
from exl2flow.tasks.artifacts import Artifacts, ProgressArtifact, Row


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
    progress = ProgressArtifact(Artifacts(base.resolve().name), "score")
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
    source: Path, title: str, scores: Sequence[Score], samples: Sequence[str]
) -> None:
    """Publish models of one source beside each other: a table, and a page with their plot."""
    if not scores:
        return
    artifacts = Artifacts(source.resolve().name)
    rows = [comparison_row(s, m) for s, m in zip(scores, compared(scores), strict=True)]
    artifacts.table("bitrates", rows, title)
    artifacts.markdown("comparison", comparison_page(scores, samples), title)


def comparison_row(score: Score, model: Compared) -> Row:
    """Return a model's row of the table of all."""
    return {
        "model": model.label,
        "bits per weight": _cell(model.bpw, ".4f"),
        "bytes": score.bytes,
        "perplexity": f"{score.perplexity:.4f}",
        "source's": _cell(score.reference_perplexity, ".4f"),
        "KL divergence": _cell(score.kl_divergence, ".5f"),
        "estimated": _cell(model.predicted_kl, ".5f"),
        "top-1 agreement": _cell(score.top1_agreement, ".5f"),
    }


def comparison_page(scores: Sequence[Score], samples: Sequence[str]) -> str:
    """Return scores, what the bits brought, its plot and the samples, as Markdown."""
    models = compared(scores)
    lines = [
        "| model | bits per weight | bytes | perplexity | source's | KL divergence | estimated "
        "| top-1 agreement |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(score, model) for score, model in zip(scores, models, strict=True)),
    ]
    sound, warnings = check_bitrates(models)
    lines += [f"\n{sound}." if sound else "", *(f"\n**Warning:** {text}." for text in warnings)]
    if any(model.kl for model in models):
        plot = base64.b64encode(render_comparison(models).encode()).decode()
        lines += ["", f"![KL divergence and bits](data:image/svg+xml;base64,{plot})"]
    for score, sample in zip(scores, samples, strict=True):
        if sample:
            quoted = "\n".join(f"> {line}" for line in sample.splitlines())
            lines += ["", f"## {score.model}", "", quoted]
    return "\n".join(lines) + "\n"


def _row(score: Score, model: Compared) -> str:
    cells = (
        _cell(model.bpw, ".4f"),
        f"{score.bytes:,}",
        f"{score.perplexity:.4f}",
        _cell(score.reference_perplexity, ".4f"),
        _cell(score.kl_divergence, ".5f"),
        _cell(model.predicted_kl, ".5f"),
        _cell(score.top1_agreement, ".5f"),
    )
    return f"| {score.model} | {' | '.join(cells)} |"


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
