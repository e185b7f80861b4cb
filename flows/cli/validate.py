"""`exl2flow validate`: perplexity and divergence of models from their source."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl2flow.core.config import ValidateOptions
from exl2flow.core.errors import ValidationFailed
from exl2flow.core.progress import Progress, Tick
from exl2flow.flows.cli.console import emit_json, say, show
from exl2flow.flows.cli.options import Values, build_validation, with_settings
from exl2flow.flows.cli.progress import shown
from exl2flow.flows.cli.settings import EVALUATION
from exl2flow.flows.cli.tables import comparison_table

if TYPE_CHECKING:
    from exl2flow.inference.evaluate import Score

EXAMPLES = (
    "Examples:",
    "exl2flow validate ./3bpw ./4bpw --reference ./Llama-3.2-1B",
    "exl2flow validate ./4bpw --reference ./Llama-3.2-1B --text novel.txt --rows 32 --json",
)


@with_settings(EVALUATION)
def validate(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL...", help="Model folders, EXL2 or plain.", show_default=False
        ),
    ],
    *,
    reference: Annotated[
        Path | None,
        typer.Option(
            "--reference",
            metavar="SOURCE",
            help="The unquantized model to compare with; without it only perplexity is known.",
            show_default="none",
        ),
    ] = None,
    values: Values,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per model, each on one line.")
    ] = False,
) -> None:
    """Score models on text: perplexity, and how far they are from their source.

    Several models share one pass of the reference. KL divergence is the mean over all positions
    of the sum of p_ref ln(p_ref / p), in nats; top-1 agreement is the share of positions at which
    both find the same token likeliest.
    """
    options = build_validation(values)
    with shown(plain=as_json) as progress:
        scores = _evaluate(models, reference, options, str(values.get("device", "auto")), progress)
    if as_json:
        for score in scores:
            emit_json(asdict(score))
    else:
        show(comparison_table([asdict(score) for score in scores]))
    _judge(scores, options)


def _evaluate(
    models: Sequence[Path],
    reference: Path | None,
    options: ValidateOptions,
    device: str,
    progress: Progress,
) -> list["Score"]:
    """Score the models on rows that fit the positions of all of them."""
    from exl2flow.inference.evaluate import evaluate
    from exl2flow.inference.text import text_rows
    from exl2flow.kernels import resolve_device
    from exl2flow.model import Tokenizer, resolve

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

    advance(0, len(ids), "")
    return evaluate(
        models, ids, reference=reference, device=resolve_device(device), advance=advance
    )


def _judge(scores: Sequence["Score"], options: ValidateOptions) -> None:
    """Warn of models above a limit.

    Raises:
        ValidationFailed: listing the models that fail.
    """
    from exl2flow.inference.validate import verdict

    failed = []
    for score in scores:
        warnings, failures = verdict(score, None, options)
        for text in warnings:
            say(f"warning: `{score.model}`: {text}", style="yellow")
        failed += [f"`{score.model}`: {text}" for text in failures]
    if failed:
        raise ValidationFailed("\n".join(failed))
