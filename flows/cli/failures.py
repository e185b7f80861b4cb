"""How a command ends: deliberate errors become one message and an exit code, never a traceback."""

import shlex
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from exl2flow.core.errors import (
    ConfigError,
    Exl2FlowError,
    Interrupted,
    PreflightFailed,
    PublicationRefused,
    SweepFailed,
    TensorShapeError,
    ValidationFailed,
)
from exl2flow.flows.cli.console import say

FAILURE, USAGE, KEYBOARD = 1, 2, 130
EXIT_CODES = (
    "Exit codes: 0 success; 1 failure (the message says what, where and what to do); 2 wrong usage "
    "or option; 130 interrupted by Ctrl-C; 143 terminated. After 130 and 143 the same command goes "
    "on where it stopped."
)
LISTS = (  # errors with a problem on each line; lines of others are quoted from a log
    ConfigError,
    PreflightFailed,
    PublicationRefused,
    SweepFailed,
    TensorShapeError,
    ValidationFailed,
)
ONLY_ONCE = "--restart"  # repeating it would throw away what the interrupted run has done


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command line that goes on where these arguments were interrupted."""
    return shlex.join(["exl2flow", *(word for word in arguments if word != ONLY_ONCE)])


@contextmanager
def explained(arguments: Sequence[str]) -> Iterator[None]:
    """Turn deliberate errors of the block into a message on stderr and an exit code.

    Args:
        arguments: of the program, for the resume command.
    """
    try:
        yield
    except Interrupted as stop:
        say(f"{stop}\nresume with:\n  {resume_command(arguments)}")
        raise typer.Exit(128 + stop.signum) from None
    except Exl2FlowError as error:
        say(_message(error), style="red")
        raise typer.Exit(USAGE if isinstance(error, ConfigError) else FAILURE) from None
    except KeyboardInterrupt:
        say(f"interrupted; to repeat:\n  {resume_command(arguments)}")
        raise typer.Exit(KEYBOARD) from None


def _message(error: Exl2FlowError) -> str:
    lines = str(error).splitlines()
    if len(lines) < 2 or not isinstance(error, LISTS):
        return f"error: {error}"
    return "\n".join([f"error: {len(lines)} problems:", *(f"  - {line}" for line in lines)])


def explain_defect(error: Exception) -> None:
    """Say that something unforeseen happened, and keep its traceback in a file."""
    with tempfile.NamedTemporaryFile(
        "w",
        prefix="exl2flow-",
        suffix=".log",
        delete=False,
        encoding="utf-8",
        errors="backslashreplace",
    ) as file:
        file.write("".join(traceback.format_exception(error)))
    first = str(error).strip().partition("\n")[0]
    say(
        f"error: unexpected {type(error).__name__}: {first}\n"
        f"the traceback lies in `{Path(file.name)}`; please report it. Finished work is saved: the "
        "same command goes on where it stopped; `exl2flow --debug …` shows the traceback",
        style="red",
    )
