"""`exl2flow validate`: perplexity of models and their divergence from the source."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl2flow.core.errors import ConfigError, ValidationFailed
from exl2flow.core.options.comparison import ComparedModels
from exl2flow.core.options.config import ValidateOptions, default_work_root
from exl2flow.core.runtime.progress import Progress, Tick
from exl2flow.flows.cli.console import emit_json, say, tell
from exl2flow.flows.cli.options import with_options
from exl2flow.flows.cli.progress import shown
from exl2flow.flows.cli.sources import fetched_with_progress

if TYPE_CHECKING:
    from exl2flow.inference.report.comparison import Compared
    from exl2flow.inference.scoring.evaluate import Score

EXAMPLES = (
    "Examples:",
    "exl2flow validate ./3bpw ./4bpw --reference ./Llama-3.2-1B",
    "exl2flow validate ./4bpw --reference ./Llama-3.2-1B --text novel.txt --rows 32 --json",
    "exl2flow validate ./?bpw --reference ./Llama-3.2-1B --plot kl.svg",
)


@with_options(panel="Evaluation")
def validate(
    *,
    options: ValidateOptions,
    compared: ComparedModels,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE.svg",
            help="Plot KL divergence against bits per weight and against bytes.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", metavar="", help="Print one JSON object per model, one per line."),
    ] = False,
) -> None:
    """Score models on text: perplexity, and divergence from their source.

    All models share one pass of the reference. KL divergence is the mean over all positions of the
    sum of p_ref ln(p_ref / p), in nats; top-1 agreement is the share of positions at which both
    models rank the same token first. Among models that differ only in bits, the command warns of
    every model that surely diverges more than a smaller one: the 95 % interval lies above zero.
    """
    _check_plot(plot, compared.reference)
    if compared.reference is not None:
        root, block = default_work_root(compared.models[0]), compared.token_block
        local = fetched_with_progress(compared.reference, root, block, plain=as_json)
        compared = compared.model_copy(update={"reference": local})
    with shown(plain=as_json) as progress:
        scores = _evaluate(compared, options, progress)
    from exl2flow.flows.cli.results import show_comparison
    from exl2flow.inference.report.comparison import compared as compare
    from exl2flow.inference.report.comparison import differences

    found = compare(scores)
    if as_json:
        between = differences(found)
        for score, model in zip(scores, found, strict=True):
            steps = [known.to_json(_folder) for known in between if known.model is model]
            emit_json({**asdict(score), **model.to_json(), "differences": steps})
    else:
        show_comparison(found)
    _compare(found, plot, quiet=as_json)
    _judge(scores, options)


def _folder(model: "Compared") -> str:
    """Return the folder by which JSON names a scored model."""
    return model.label if model.score is None else model.score.model


def _check_plot(plot: Path | None, reference: Path | None) -> None:
    """Check before any work that the plot can be drawn and written.

    Raises:
        ConfigError: it cannot.
    """
    if plot is None:
        return
    if reference is None:
        raise ConfigError(
            "`--plot` shows divergences, which need the source; name it with `--reference`"
        )
    if plot.suffix != ".svg" or not plot.absolute().parent.is_dir():
        raise ConfigError(f"`--plot {plot}` is not a name ending in `.svg` in an existing folder")


def _compare(models: Sequence["Compared"], plot: Path | None, *, quiet: bool) -> None:
    """Report whether divergence falls as size rises, and plot both."""
    from exl2flow.core.store.files import write_text
    from exl2flow.inference.report.comparison import check_bitrates
    from exl2flow.inference.report.plots import render_comparison

    sound, warnings = check_bitrates(models)
    if sound and not quiet:
        tell(sound)
    for text in warnings:
        say(f"warning: {text}", style="yellow")
    if plot is not None:
        write_text(plot, render_comparison(models))
        say(f"plot    {plot}")


def _evaluate(
    compared: ComparedModels, options: ValidateOptions, progress: Progress
) -> list["Score"]:
    """Score the models on rows that are short enough for all of them."""
    from exl2flow.inference.scoring.evaluate import evaluate
    from exl2flow.inference.scoring.text import text_rows
    from exl2flow.kernels import resolve_device
    from exl2flow.model import Tokenizer, resolve

    models, reference = compared.models, compared.reference
    everyone = [*models, reference] if reference is not None else models
    row_tokens = min(options.row_tokens, *(resolve(folder).max_positions for folder in everyone))
    ids = text_rows(
        options.text,
        Tokenizer.load(everyone[-1]),
        rows=options.rows,
        row_tokens=row_tokens,
    )

    def advance(done: int, total: int, detail: str) -> None:
        progress(Tick(stage="validate", done=done, total=total, detail=detail))

    return evaluate(
        models, ids, reference=reference, device=resolve_device(compared.device), advance=advance
    )


def _judge(scores: Sequence["Score"], options: ValidateOptions) -> None:
    """Warn of models above the warning limit.

    Raises:
        ValidationFailed: listing the models above the failure limit.
    """
    from exl2flow.inference.validate.stage import verdict

    failed = []
    for score in scores:
        warnings, failures = verdict(score, None, options)
        for text in warnings:
            say(f"warning: `{score.model}`: {text}", style="yellow")
        failed += [f"`{score.model}`: {text}" for text in failures]
    if failed:
        raise ValidationFailed("\n".join(failed))
