"""Turns errors of a command into a message and an exit code, never a traceback."""

import re
import shlex
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from exl2flow.cli.output.console import json_line, say
from exl2flow.cli.output.extras import how_to_install
from exl2flow.core import words
from exl2flow.core.errors import (
    ConfigError,
    Exl2FlowError,
    Interrupted,
    PreflightFailed,
    PublicationRefused,
    SweepFailed,
    TensorShapeError,
    ValidationFailed,
    WriteFailed,
)

FAILURE, USAGE, KEYBOARD = 1, 2, 130
EXIT_CODES = (
    "Exit codes: 0 success; 1 failure (the message says what, where and what to do); 2 wrong usage "
    "or option; 130 interrupted by Ctrl-C; 143 terminated. After 130 and 143, repeat the command "
    "to resume. With `--json`, the last line on stderr is the error as a JSON object."
)
AS_JSON = "--json"
NO_ARGUMENTS = "NoArgsIsHelpError"  # typer's private class
QUOTED = re.compile(r"'([^'\n]+)'")  # names in typer's own messages
LISTS = (  # errors with one problem per line; other errors may quote lines of a log
    ConfigError,
    PreflightFailed,
    PublicationRefused,
    SweepFailed,
    TensorShapeError,
    ValidationFailed,
)
ONLY_ONCE = "--restart"  # repeating it would delete the work of the interrupted run
FAILURES = (MemoryError, RecursionError, OSError, RuntimeError)  # of the machine, or of its limits
GPU_MEMORY = "OutOfMemoryError"  # torch's class, named so that no command loads torch for it
CPU_MEMORY = "can't allocate memory"  # torch's message where the CPU has no more
RESUMABLE = ("convert", "sweep", "measure", "refine", "publish")  # commands that save their work


def _saves_work(arguments: Sequence[str]) -> bool:
    """Return whether a command goes on where it stopped if it is repeated."""
    return next((word for word in arguments if not word.startswith("-")), "") in RESUMABLE


def saved_work(arguments: Sequence[str]) -> str:
    """Return how the message of a failed command ends: what became of its work."""
    told = "; finished work is saved: repeat the command to resume"
    return told if _saves_work(arguments) else ""


def how_to_resume(arguments: Sequence[str]) -> str:
    """Return how the message of an interrupted command ends: how to resume it."""
    words = ("exl2flow", *(word for word in arguments if word != ONLY_ONCE))
    return f"\nresume with:\n  {shlex.join(words)}" if _saves_work(arguments) else ""


def _fail(
    code: int, kind: str, message: str, arguments: Sequence[str], *, hint: str = "", style: str = ""
) -> None:
    """Print what went wrong on stderr, for people, or as JSON if a command prints that."""
    if AS_JSON in arguments:
        say(as_json(code, kind, message))
    else:
        say(message + hint, style=style)


def as_json(code: int, kind: str, message: str) -> str:
    """Return an error as the line that `--json` promises."""
    error = {"type": kind, "message": message.removeprefix("error: ")}
    return json_line({"error": error, "exit_code": code})


def termination(code: int, arguments: Sequence[str]) -> str:
    """Return what a program says that is terminated."""
    told = f"terminated{saved_work(arguments)}"
    return as_json(code, "Interrupted", told) if AS_JSON in arguments else told


def explain_usage(error: typer.TyperException, arguments: Sequence[str]) -> None:
    """Print wrong usage, which typer found, like every other error."""
    if type(error).__name__ == NO_ARGUMENTS:  # its message is the help, which was printed
        return
    message = QUOTED.sub(r"`\1`", error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    hint = f"\nsee `{context.command_path} --help`" if context is not None else ""
    told = f"error: {message[:1].lower()}{message[1:]}"
    _fail(error.exit_code, "Usage", told, arguments, hint=hint, style="red")


@contextmanager
def explained(arguments: Sequence[str]) -> Iterator[None]:
    """Turn errors of the block into a message on stderr and an exit code; let defects pass.

    Args:
        arguments: arguments of the program, for the resume command.
    """
    try:
        yield
    except Interrupted as stop:
        code, hint = 128 + stop.signum, how_to_resume(arguments)
        _fail(code, "Interrupted", str(stop), arguments, hint=hint)
        raise typer.Exit(code) from None
    except Exl2FlowError as error:
        tail = saved_work(arguments) if isinstance(error, WriteFailed) else ""
        code = USAGE if isinstance(error, ConfigError) else FAILURE
        _fail(code, type(error).__name__, _message(error) + tail, arguments, style="red")
        raise typer.Exit(code) from None
    except ModuleNotFoundError as error:
        if error.name is None or (message := how_to_install(error.name)) is None:
            raise
        _fail(FAILURE, type(error).__name__, f"error: {message}", arguments, style="red")
        raise typer.Exit(FAILURE) from None
    except FAILURES as error:
        if (message := of_the_machine(error)) is None:
            raise
        told = f"error: {message}{saved_work(arguments)}"
        _fail(FAILURE, type(error).__name__, told, arguments, style="red")
        raise typer.Exit(FAILURE) from None
    except KeyboardInterrupt:
        hint = how_to_resume(arguments)
        _fail(KEYBOARD, "Interrupted", "interrupted", arguments, hint=hint)
        raise typer.Exit(KEYBOARD) from None


def _message(error: Exl2FlowError) -> str:
    lines = str(error).splitlines()
    if len(lines) < 2 or not isinstance(error, LISTS):
        return f"error: {error}"
    return "\n".join([f"error: {len(lines)} problems:", *(f"  - {line}" for line in lines)])


def of_the_machine(error: BaseException) -> str | None:
    """Return what is wrong with the machine, in words; None if the program is at fault."""
    if type(error).__name__ == GPU_MEMORY:
        return (
            "the GPU has no more memory; end other programs that use it, or use `--device cpu`; "
            "`--max-memory` limits what a conversion takes"
        )
    if isinstance(error, MemoryError) or CPU_MEMORY in str(error):
        return (
            "the machine has no more memory; end other programs, or ask for less work, as with "
            "fewer `--rows` of a conversion"
        )
    if isinstance(error, RecursionError):
        return "a file of the model is nested too deeply to be read; get its files again, complete"
    if isinstance(error, OSError):
        where = "" if error.filename is None else f" for `{error.filename}`"
        return f"the system refused a request{where}: {words.cause(error)}"
    return None


def explain_defect(error: Exception, arguments: Sequence[str]) -> None:
    """Report an unexpected error, and keep its traceback in a file."""
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
    told = (
        f"error: unexpected {type(error).__name__}: {first}\n"
        f"the traceback is in `{Path(file.name)}`; please report it, with what "
        "`exl2flow doctor --json` prints; `exl2flow --debug …` shows the traceback"
        f"{saved_work(arguments)}"
    )
    _fail(FAILURE, "Unexpected", told, arguments, style="red")
