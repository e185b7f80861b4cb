"""Scores models, and prints and plots the comparison; its imports take seconds."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from exl2flow.cli.options import local
from exl2flow.cli.output.console import emit_json, say, tell
from exl2flow.cli.output.progress import shown
from exl2flow.cli.output.results import show_comparison
from exl2flow.cli.work.sources import fetched_with_progress
from exl2flow.core.model_name import on_hub
from exl2flow.core.options.comparison import ComparedModels
from exl2flow.core.options.config import default_work_root
from exl2flow.core.options.validation import ValidateOptions
from exl2flow.core.reports import Score
from exl2flow.core.runtime.progress import Tick
from exl2flow.core.store.crew import places
from exl2flow.core.store.files import write_text
from exl2flow.inference.report.comparison import Compared, check_bitrates, compared, differences
from exl2flow.inference.report.plots import render_comparison
from exl2flow.inference.validate.compare import compare
from exl2flow.inference.validate.stage import judge
from exl2flow.pipeline.devices import resolve_device


def validate_models(
    config: ComparedModels, options: ValidateOptions, plot: Path | None, *, as_json: bool
) -> None:
    """Score models, and report whether divergence falls as size rises.

    Raises:
        ValidationFailed: a model is above a limit.
    """
    folders = {local(model, plain=as_json): model for model in config.models}
    scores = _scored(list(folders), config, options, plain=as_json)
    names = {str(folder): str(model) for folder, model in folders.items()}
    models = compared(scores, names)
    if as_json:
        between = differences(models)
        for score, model in zip(scores, models, strict=True):
            steps = [known.to_json(_folder) for known in between if known.model is model]
            emit_json({**asdict(score), **model.to_json(), "differences": steps})
    else:
        show_comparison(models)
    sound, warnings = check_bitrates(models)
    if sound and not as_json:
        tell(sound)
    for text in warnings:
        say(f"warning: {text}", style="yellow")
    if plot is not None:
        write_text(plot, render_comparison(models))
        say(f"plot    {plot}")
    judge(scores, options)


def _scored(
    models: Sequence[Path], config: ComparedModels, options: ValidateOptions, *, plain: bool
) -> list[Score]:
    reference, first = config.reference, config.models[0]
    if reference is not None:
        root = default_work_root(Path(first.name) if on_hub(first) else first)
        reference = fetched_with_progress(reference, root, config.token_block, plain=plain)
    with shown(plain=plain) as progress:
        return compare(
            models,
            reference,
            options,
            places=places(config.gpus, str(resolve_device(config.device))),
            advance=lambda done, total, detail: progress(
                Tick(stage="validate", done=done, total=total, detail=detail)
            ),
        )


def _folder(model: Compared) -> str:
    """Return the folder by which JSON names a scored model."""
    return model.label if model.score is None else model.score.model
