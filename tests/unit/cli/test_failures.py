import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.cli.output.failures import explain_defect, explained, how_to_resume
from exl2flow.core import errors

RESUMES = "; finished work is saved: repeat the command to resume"
ARGUMENTS = ["convert", "my model", "--out", "o", "--restart"]
DELIBERATE = [
    value
    for value in vars(errors).values()
    if isinstance(value, type)
    and issubclass(value, errors.Exl2FlowError)
    and value is not errors.Interrupted
]


@pytest.mark.parametrize("kind", DELIBERATE, ids=lambda kind: kind.__name__)
def test_a_deliberate_error_is_one_message_and_an_exit_code(
    kind: type[errors.Exl2FlowError], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as leaving, explained(ARGUMENTS):
        raise kind("`x` is [wrong]; do this")

    assert leaving.value.exit_code == (2 if kind is errors.ConfigError else 1)
    tail = RESUMES if kind is errors.WriteFailed else ""
    assert capsys.readouterr().err == f"error: `x` is [wrong]; do this{tail}\n"


@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "why"])
@pytest.mark.parametrize("error", [errors.WriteFailed("full"), MemoryError(), OSError("odd")])
def test_command_that_saves_no_work_is_not_said_to_resume(
    command: str, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    for found in (error, KeyboardInterrupt()):
        with pytest.raises(typer.Exit), explained([command, "my model"]):
            raise found
    explain_defect(ValueError("odd"), [command])

    said = capsys.readouterr().err
    assert "resume" not in said
    assert "interrupted\n" in said


def test_several_problems_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), explained(ARGUMENTS):
        raise errors.PreflightFailed("first\nsecond")

    assert capsys.readouterr().err == "error: 2 problems:\n  - first\n  - second\n"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_stage_prints_how_to_go_on(
    signum: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as leaving, explained(ARGUMENTS):
        raise errors.Interrupted("stopped; everything finished is saved", signum=signum)

    assert leaving.value.exit_code == 128 + signum
    assert capsys.readouterr().err.splitlines() == [
        "stopped; everything finished is saved",
        "resume with:",
        "  exl2flow convert 'my model' --out o",
    ]


def test_an_interrupt_outside_of_stages_exits_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as leaving, explained(ARGUMENTS):
        raise KeyboardInterrupt

    assert leaving.value.exit_code == 130
    assert "Traceback" not in capsys.readouterr().err


def test_the_resume_command_keeps_what_was_done() -> None:
    assert "--restart" not in how_to_resume(ARGUMENTS)


def test_a_defect_leaves_its_traceback_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    try:
        raise ValueError("first line\nsecond line")
    except ValueError as error:
        explain_defect(error, ARGUMENTS)

    message = capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    assert message.startswith("error: unexpected ValueError: first line\n")
    assert str(file) in message
    assert "Traceback" in file.read_text()


def test_lines_that_an_error_quotes_are_no_problems(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), explained(ARGUMENTS):
        raise errors.ServerFailed("the server ended; its log:\nfirst\nsecond")

    assert capsys.readouterr().err == "error: the server ended; its log:\nfirst\nsecond\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "the machine has no more memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried …"), "the GPU has no more memory"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/model"),
            "for `out/model`: No space left on device",
        ),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "refused a request: Too many open"),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_limits_of_the_machine_are_one_message_without_a_traceback(
    error: Exception, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as leaving, explained(ARGUMENTS):
        raise error

    said = capsys.readouterr().err
    assert leaving.value.exit_code == 1
    assert said.startswith("error: ")
    assert message in said
    assert "Traceback" not in said


def test_a_failed_allocation_of_torch_is_a_message_and_a_defect_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit), explained(ARGUMENTS):
        torch.empty(2**58, dtype=torch.uint8)

    assert "the machine has no more memory" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="shape"), explained(ARGUMENTS):
        torch.zeros(2, 3) @ torch.zeros(2, 3)  # a defect: `main` keeps its traceback


def test_a_file_nested_without_end_is_refused_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 5_000 + "]" * 5_000)

    words = ["convert", str(tmp_path), "--out", str(tmp_path / "o"), "--no-prefect", "--dry-run"]
    result = CliRunner().invoke(app, words)

    assert result.exit_code == 1
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr
    assert "unexpected" not in result.stderr


IN_A_CALLBACK = """
import os, sys
from pydantic import BaseModel, model_serializer
import exl2flow.cli.main

class Model(BaseModel):
    @model_serializer
    def serialize(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        return {}

main = sys.modules["exl2flow.cli.main"]
main.app = lambda: Model().model_dump()
main.main()
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_a_callback_of_pydantic_is_no_defect(signum: int, code: int) -> None:
    """Pydantic replaces the signal's exception by its own; Prefect imports it after the start."""
    words = [sys.executable, "-c", IN_A_CALLBACK, str(int(signum))]

    done = subprocess.run(words, capture_output=True, text=True)

    assert done.returncode == code, done.stderr
    assert "unexpected" not in done.stderr


WHILE_LEAVING = """
import atexit, os, signal, sys
import exl2flow.cli.main

main = sys.modules["exl2flow.cli.main"]
main.app = lambda: sys.exit(130)
atexit.register(os.kill, os.getpid(), signal.SIGINT)
main.main()
"""


def test_a_second_ctrl_c_while_the_program_leaves_shows_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", WHILE_LEAVING], capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


CRASHES = """
import os, signal, sys
import exl2flow.cli.main

main = sys.modules["exl2flow.cli.main"]
main.app = lambda: os.kill(os.getpid(), signal.SIGSEGV)
main.main()
"""


def test_a_crash_in_native_code_shows_what_python_was_doing() -> None:
    done = subprocess.run([sys.executable, "-c", CRASHES], capture_output=True, text=True)

    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.startswith("Fatal Python error: Segmentation fault")
    assert "in main" in done.stderr
