"""The program `exl2flow`: its commands, its options, its exit."""

import faulthandler
import inspect
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from exl2flow.cli.commands import (
    agent,
    bench,
    chat,
    clean,
    convert,
    doctor,
    fits,
    generate,
    inspection,
    measure,
    publish,
    refine,
    report,
    serve,
    soak,
    sweep,
    validate,
    why,
)
from exl2flow.cli.output.console import OUT, escape_what_cannot_be_encoded, logging_to_stderr
from exl2flow.cli.output.failures import (
    EXIT_CODES,
    FAILURE,
    KEYBOARD,
    explain_defect,
    explain_usage,
    explained,
    termination,
)
from exl2flow.cli.output.help import HelpCommand, HelpGroup


class _Commands(HelpGroup):
    """Runs every command with errors turned into messages and logs on stderr."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """Keep the arguments, for the resume command."""
        return super().make_context(info_name, args, *rest, obj=list(args), **extra)

    def main(self, args: Any = None, *rest: Any, standalone_mode: bool = True, **more: Any) -> Any:
        """Run a command and exit; wrong usage is an error like the others, without typer's box."""
        given = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(given, *rest, standalone_mode=False, **more)  # type: ignore[misc]  # rest has no such argument
        except typer.TyperException as error:
            if not standalone_mode:
                raise
            explain_usage(error, given)
            sys.exit(error.exit_code)
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        level = logging.DEBUG if ctx.params.get("debug") else logging.WARNING
        with logging_to_stderr(level), explained(ctx.obj):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    name="exl2flow",
    help="Convert Hugging Face language models to EXL2, resumably, and run them.",
    epilog=EXIT_CODES
    + "\n\nExamples:\n\nexl2flow convert ./Llama-3.2-1B --out ./Llama-3.2-1B-exl2 --bpw 4.0"
    + "\n\nexl2flow generate ./Llama-3.2-1B-exl2 --prompt 'Once upon a time'",
    no_args_is_help=True,
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
        typer.Option("--debug", help="Show detailed logs, and tracebacks of unexpected errors."),
    ] = False,
) -> None:
    """Options that come before the command."""


def _reflowed(command: Callable[..., None]) -> str:
    """Return a command's docstring with a line per paragraph, for terminals of any width."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


# what needs Prefect, from the floor above
_server, _webhook = (import_module(f"exl2flow.flows.cli.{name}") for name in ("server", "webhook"))
for _name, _command, _examples in (
    ("convert", convert.convert, convert.EXAMPLES),
    ("sweep", sweep.sweep, sweep.EXAMPLES),
    ("report", report.report, report.EXAMPLES),
    ("measure", measure.measure, measure.EXAMPLES),
    ("refine", refine.refine, refine.EXAMPLES),
    ("fits", fits.fits, fits.EXAMPLES),
    ("inspect", inspection.inspect_command, inspection.EXAMPLES),
    ("validate", validate.validate, validate.EXAMPLES),
    ("bench", bench.bench_command, bench.EXAMPLES),
    ("generate", generate.generate, generate.EXAMPLES),
    ("chat", chat.chat, chat.EXAMPLES),
    ("serve", serve.serve, serve.EXAMPLES),
    ("agent", agent.agent, agent.EXAMPLES),
    ("soak", soak.soak, soak.EXAMPLES),
    ("publish", publish.publish, publish.EXAMPLES),
    ("why", why.why, why.EXAMPLES),
    ("clean", clean.clean_command, clean.EXAMPLES),
    ("doctor", doctor.doctor, doctor.EXAMPLES),
    ("webhook", _webhook.webhook, _webhook.EXAMPLES),
):
    _epilog = "\n\n".join(("Examples:", *_examples))
    app.command(_name, cls=HelpCommand, help=_reflowed(_command), epilog=_epilog)(_command)
for _info in _server.app.registered_commands:
    _info.cls = HelpCommand
app.add_typer(_server.app, name="server", cls=HelpGroup)


_terminations: list[int] = []  # signals that ended the program


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """Raise an exception, so that temporary servers and files are cleaned up."""
    _terminations.append(signum)
    code = 128 + signum
    os.write(2, f"\n{termination(code, sys.argv[1:])}\n".encode())
    raise SystemExit(code)


def forbid_cores() -> None:
    """Let a crash leave no core, which would hold the tokens of the environment."""
    _, limit = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limit))


def show_crashes() -> None:
    """Let a crash in native code, such as a driver's, show what Python was doing."""
    if sys.__stderr__ is not None:  # closed by who started the program
        faulthandler.enable(sys.__stderr__)


# How long torch's threads spin while they wait for each other. With the default, stages take twice
# as long as soon as another process, such as Prefect's server, wants a core.
SPIN_COUNT = "1000"


def main() -> None:
    """Run the program and exit."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is imported
    os.environ.setdefault("DO_NOT_TRACK", "1")  # read when Prefect is imported
    try:
        signal.signal(signal.SIGTERM, _terminate)
        forbid_cores()
        show_crashes()
        escape_what_cannot_be_encoded()
        app()
    except KeyboardInterrupt:  # while typer puts the commands together
        sys.exit(KEYBOARD)
    except Exception as error:  # the outermost frame: only defects get here
        if "--debug" in sys.argv:
            raise
        if _terminations:  # a library replaced the exception, as pydantic does in its callbacks
            sys.exit(128 + _terminations[0])
        if KeyboardInterrupt.__name__ in str(error):  # likewise
            sys.exit(KEYBOARD)
        explain_defect(error, sys.argv[1:])
        sys.exit(FAILURE)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a late one has nothing left to stop
