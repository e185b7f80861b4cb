"""`exl2flow agent`: run a coding agent on a model, with a server for it."""

from pathlib import Path
from typing import Annotated

import typer

from exl2flow.cli.options import ModelFolder, Values, build, settings_of, with_options, words_of
from exl2flow.core.options.serving import LISTEN, ServeOptions

# of `exl2flow serve`; others are in the file of `--config`
FIELDS = {"device", "cache", "tokens", "max_tokens", "cache_ram", "draft", "ngram", "format"}
PORT = ServeOptions.model_fields["port"].default
SETTINGS = tuple(setting for setting in settings_of(ServeOptions) if setting.field in FIELDS)
EXAMPLES = (
    "exl2flow agent claude ./Qwen3-8B-4.0bpw",
    "exl2flow agent codex ./model --cache q6 --tokens 131072",
    "exl2flow agent opencode ./model -- run 'Explain this project.'",
)


@with_options(*SETTINGS)
def agent(
    name: Annotated[
        str, typer.Argument(metavar="AGENT", help="The agent: claude, codex or opencode.")
    ],
    model: ModelFolder,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGUMENTS", help="Arguments of the agent, behind `--`."),
    ] = None,
    *,
    values: Values,
    port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            min=1,
            max=65535,
            help="Port of the server: one that runs there is used, else one is started.",
            rich_help_panel=LISTEN,
        ),
    ] = PORT,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML file with further options of `exl2flow serve`.",
            rich_help_panel=LISTEN,
        ),
    ] = None,
) -> None:
    """Run Claude Code, Codex or opencode on a model: serve it, start the agent, end the server.

    A server that runs at the port already is used if it has the model, and goes on afterwards.
    The exit code is the agent's.
    """
    from exl2flow.cli.work.agent import run_agent

    build(ServeOptions, values)  # refuses what is out of range
    options = [] if config is None else ["--config", str(config)]
    options += words_of(SETTINGS, values)
    code = run_agent(name, model, arguments or (), port=port, options=options)
    raise typer.Exit(code)
