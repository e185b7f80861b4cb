"""The program `exl2flow`: its commands, its options, its exit."""

import logging
import os
import signal
import sys
from importlib.metadata import version
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from exl2flow.flows.cli import (
    convert,
    generate,
    inspection,
    measure,
    publish,
    refine,
    report,
    server,
    sweep,
    validate,
    webhook,
)
from exl2flow.flows.cli.console import (
    OUT,
    escape_what_cannot_be_encoded,
    logging_to_stderr,
)
from exl2flow.flows.cli.failures import EXIT_CODES, FAILURE, explain_defect, explained


class _Commands(TyperGroup):
    """Runs every command with errors explained and logs shown."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """Keep the arguments: an interrupted command prints them again."""
        return super().make_context(info_name, args, *rest, obj=list(args), **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was chosen."""
        level = logging.DEBUG if ctx.params.get("debug") else logging.WARNING
        with logging_to_stderr(level), explained(ctx.obj):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    name="exl2flow",
    help="Convert Hugging Face language models into EXL2 quantized models, resumably; run them.",
    epilog=EXIT_CODES
    + "\n\nExamples:\n\nexl2flow convert ./Llama-3.2-1B --out ./Llama-3.2-1B-exl2 --bpw 4.0"
    + "\n\nexl2flow generate ./Llama-3.2-1B-exl2 --prompt 'Once upon a time'",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        OUT.print(f"exl2flow {version('exl2flow')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show detailed logs, and tracebacks of unforeseen errors."),
    ] = False,
) -> None:
    """Take the options that stand before the command."""


for _name, _command, _examples in (
    ("convert", convert.convert, convert.EXAMPLES),
    ("sweep", sweep.sweep, sweep.EXAMPLES),
    ("report", report.report, report.EXAMPLES),
    ("measure", measure.measure, measure.EXAMPLES),
    ("refine", refine.refine, refine.EXAMPLES),
    ("inspect", inspection.inspect_command, inspection.EXAMPLES),
    ("validate", validate.validate, validate.EXAMPLES),
    ("generate", generate.generate, generate.EXAMPLES),
    ("publish", publish.publish, publish.EXAMPLES),
    ("webhook", webhook.webhook, webhook.EXAMPLES),
):
    app.command(_name, epilog="\n\n".join(_examples))(_command)
app.add_typer(server.app, name="server")


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """Leave by an exception, so that temporary servers and files are cleaned up."""
    os.write(2, b"\nterminated; finished work is saved: the same command goes on\n")
    raise SystemExit(128 + signum)


# How long torch's threads wait busily for each other. The default takes twice the time as soon as
# another process, such as Prefect's server, wants a core; this costs nothing on an idle machine.
SPIN_COUNT = "1000"


def main() -> None:
    """Run the program and exit."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is imported
    signal.signal(signal.SIGTERM, _terminate)
    escape_what_cannot_be_encoded()
    try:
        app()
    except Exception as error:  # the outermost frame: whatever arrives here is a defect
        if "--debug" in sys.argv:
            raise
        explain_defect(error)
        sys.exit(FAILURE)
