"""Help of every command in words, and errors without a trace of Python."""

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from exl2flow.cli.main import app

PYTHON = re.compile(r"<\w|list\[|\{|\[default: \(|\.\.\.\]\.\.\.|\w\.\.\.\.")
REFUSED = re.compile(r"\[Errno|Error\(|Value error|\['")


def commands() -> list[list[str]]:
    """Return the words of every command, and none for the program itself."""
    program = typer.main.get_command(app)
    found = [[]]
    for name, command in program.commands.items():
        found += [[name], *([name, each] for each in getattr(command, "commands", ()))]
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_shows_no_python(command: list[str]) -> None:
    wanted = "--help-all" if command and command[0] in ("convert", "generate") else "--help"

    result = CliRunner().invoke(app, [*command, wanted], env={"COLUMNS": "200"})

    assert result.exit_code == 0
    assert not PYTHON.search(result.output.replace("[ARGS]...", "")), result.output
    assert not re.search(r"-h[ \w]* bool", result.output)


def test_arguments_are_in_brackets_only_if_they_may_be_left_out() -> None:
    for command, usage in (
        ("publish", "publish [OPTIONS] FOLDER... "),
        ("clean", "clean [OPTIONS] [WORK_ROOT...] "),
        ("why", "why [OPTIONS] RUN [STAGE] "),
    ):
        assert usage in CliRunner().invoke(app, [command, "--help"]).output


def test_defaults_are_shown_once_with_their_value() -> None:
    text = CliRunner().invoke(app, ["convert", "--help"], env={"COLUMNS": "200"}).output

    assert text.count("[default: 115]") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "m", "--prompt", "x", "--cache", "q5"], "`q5` is not one of `fp16`"),
        (["generate", "m", "--prompt", "x", "--json-schema", "no.json"], "cannot read `no.json`: "),
        (["generate", "m", "--prompts", "no.jsonl"], "`no.jsonl`: No such file or directory"),
        (["chat", "m", "--profile", "mine"], "chat.toml`: No such file or directory"),
    ],
)
def test_wrong_value_is_refused_in_words(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})

    assert result.exit_code == 2
    assert said in result.output
    assert not REFUSED.search(result.output)


def test_folder_of_models_names_them(tmp_path: Path) -> None:
    for name in ("2.5bpw", "4.0bpw"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")

    result = CliRunner().invoke(app, ["validate", str(tmp_path)])

    assert result.exit_code == 1
    assert (
        f"`{tmp_path}` holds several models; give one of its folders: `2.5bpw`, `4.0bpw`"
    ) in result.output.replace("\n", " ")
