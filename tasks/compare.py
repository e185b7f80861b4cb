"""Tasks of the flow `validate`: score models against a reference, and let them write a sample."""

from collections.abc import Sequence
from pathlib import Path

from prefect import task

from exl2flow.core.config import ValidateOptions
from exl2flow.core.progress import Tick
from exl2flow.inference.evaluate import Score, evaluate
from exl2flow.inference.text import text_rows
from exl2flow.inference.validate import generate_sample
from exl2flow.model import Tokenizer, resolve
from exl2flow.tasks.artifacts import Artifacts, ProgressArtifact


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
