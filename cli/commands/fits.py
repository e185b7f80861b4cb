"""`exl2flow fits`: what of a repository or folder fits a card, before any download."""

import re
from pathlib import Path
from typing import Annotated

import typer

from exl2flow.cli.options import AsJson, named, validated
from exl2flow.cli.options.setting import one_of
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.base import CacheName
from exl2flow.core.options.groups import FitOptions

EXAMPLES = (
    "exl2flow fits org/name-exl2 --memory 24GB --context 32k --cache q6",
    "exl2flow fits ./Llama-3.2-1B --memory 8GB   (what conversions would make)",
    "exl2flow fits ./sweep --json | jq '.models[] | select(.fits).name'",
)
TOKENS = re.compile(r"(\d+)([kK]?)")
UNITS = {"": 1, "k": 1024}
FLAGS = {name: f"--{name}" for name in FitOptions.model_fields}


def fits(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Repository on the Hub: org/name, org/name@revision, org/name:4.0 (bits). Or a "
            "folder: an EXL2 model, a model to convert, or folders with EXL2 models.",
        ),
    ],
    *,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the GPU, as 24GB.",
            show_default="that of the first GPU here",
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Tokens whose cache must fit, as 8192 or 32k (32,768).",
            show_default="8192, or the model's if it has fewer",
        ),
    ] = None,
    cache: Annotated[
        CacheName,
        typer.Option(
            metavar="FORMAT",
            help="Format of that cache: fp16, fp8, q8, q8/q6, q6, q6/q4, q4.",
            parser=one_of(CacheName),
        ),
    ] = FitOptions.model_fields["cache"].default,
    as_json: AsJson = False,
) -> None:
    """Show which bitrates of a model fit a GPU, with their cache, and what to type for them.

    Only configs, listings and the headers of weights are read: nothing large is downloaded. EXL2
    models are listed as they are; for an unquantized model, what conversions would make of it. Each
    row has the longest text for which the memory suffices, too. The exit code is 1 if nothing fits.
    """
    name, tokens = named(model), None if context is None else _tokens(context)
    from exl2flow.cli.work.fits import memory_here, show_fits  # imports torch

    given = {"memory": memory or memory_here(), "context": tokens, "cache": cache}
    show_fits(name or model, validated(FitOptions, given, FLAGS), as_json=as_json)


def _tokens(text: str) -> int:
    """Return a number of tokens; raises `ConfigError`."""
    match = TOKENS.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"`--context {text}` is not a number of tokens; give one such as 8192 or 32k"
        )
    return int(match[1]) * UNITS[match[2].lower()]
