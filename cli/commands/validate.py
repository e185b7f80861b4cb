"""`exl2flow validate`: perplexity of models and their divergence from the source."""

from pathlib import Path
from typing import Annotated

import typer

from exl2flow.cli.options import with_options
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.comparison import ComparedModels
from exl2flow.core.options.validation import ValidateOptions

EXAMPLES = (
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
            metavar="FILE.svg", help="Plot KL divergence against bits per weight and against bytes."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per model, one per line.")
    ] = False,
) -> None:
    """Score models on text: perplexity, and divergence from their source.

    All models share one pass of the reference. KL divergence is the mean over all positions of the
    sum of p_ref ln(p_ref / p), in nats; top-1 agreement is the share of positions at which both
    models rank the same token first. Among models that differ only in bits, the command warns of
    every model that surely diverges more than a smaller one: the 95 % interval lies above zero.
    """
    if plot is not None and compared.reference is None:
        raise ConfigError(
            "`--plot` shows divergences, which need the source; name it with `--reference`"
        )
    if plot and not (plot.suffix == ".svg" and plot.absolute().parent.is_dir()):
        raise ConfigError(f"`--plot {plot}` is not a name ending in `.svg` in an existing folder")
    from exl2flow.cli.work.validation import validate_models  # imports torch

    validate_models(compared, options, plot, as_json=as_json)
