import signal
import tempfile
from pathlib import Path

import pytest
import typer

from exl2flow.core import errors
from exl2flow.flows.cli.failures import explain_defect, explained, resume_command

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
    assert capsys.readouterr().err == "error: `x` is [wrong]; do this\n"


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
    assert "--restart" not in resume_command(ARGUMENTS)


def test_a_defect_leaves_its_traceback_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    try:
        raise ValueError("first line\nsecond line")
    except ValueError as error:
        explain_defect(error)

    message = capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    assert message.startswith("error: unexpected ValueError: first line\n")
    assert str(file) in message
    assert "Traceback" in file.read_text()


def test_lines_that_an_error_quotes_are_no_problems(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), explained(ARGUMENTS):
        raise errors.ServerFailed("the server ended; its log:\nfirst\nsecond")

    assert capsys.readouterr().err == "error: the server ended; its log:\nfirst\nsecond\n"
