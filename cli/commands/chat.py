"""`exl2flow chat`: a conversation with a model, in the terminal or through pipes."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from exl2flow.cli.options import NAMED, Values, local, with_options
from exl2flow.cli.options.chat import CHAT, build_chat, profile_of
from exl2flow.cli.output.console import OUT, printable
from exl2flow.core.errors import ConfigError
from exl2flow.core.model_name import on_hub
from exl2flow.core.options.chat import ChatFiles

EXAMPLES = (
    "exl2flow chat ./Llama-3.2-1B-4.0bpw",
    "exl2flow chat ./model --system 'You are a pirate.' --temperature 0.7 --stats",
    "exl2flow chat org/name:4.0",
    "exl2flow chat ./model --resume",
    "exl2flow chat ./model --draft ./smaller-model --cache q6",
    "git diff | exl2flow chat ./model --system 'Write a commit message.' > message.txt",
)


@with_options(*CHAT)
def chat(
    model: Annotated[Path | None, typer.Argument(metavar="MODEL", help=NAMED)] = None,
    *,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Answer one message, from standard input, with one JSON object."
        ),
    ] = False,
    formats: Annotated[
        bool,
        typer.Option("--formats", help="List the prompt formats, each with an example, and exit."),
    ] = False,
    files: ChatFiles,
    values: Values,
) -> None:
    """Chat with a model. /help lists the commands. In a pipe, standard input is one message."""
    if formats:
        from exl2flow.cli.terminal.start import list_formats  # imports torch

        list_formats()
        return
    if model is None:
        raise ConfigError("give the folder of a model, or its name on the Hub")
    if files.remember and files.profile is None:
        raise ConfigError("`--remember` goes with `--profile`")
    folder = local(model, plain=as_json)
    key = str(on_hub(model) or model.resolve())
    profile, origin = profile_of(key, files.profile, remember=files.remember)
    given = {**profile, **values}
    try:
        config = build_chat(given, folder)
    except ConfigError as error:
        build_chat(values, folder)  # raises if not the profile is wrong
        raise ConfigError(f"{origin}: {error}") from error
    talks = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    if talks:
        OUT.print(printable(f"loading {model} …"), style="dim", markup=False, soft_wrap=True)
    from exl2flow.cli.terminal.start import answer_one, talk  # these import torch

    if talks:
        talk(folder, key, config, given, files)
    else:
        answer_one(folder, key, config, given, files, as_json=as_json)
