"""Wrong usage is an error like the others; with `--json` every error is one JSON object."""

import json

import pytest
import typer
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.cli.output.failures import explain_defect, explained, termination
from exl2flow.core.errors import ConfigError, Interrupted, PreflightFailed

BOX = "╭"


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["convrt"], "no such command `convrt`. Did you mean `convert`?"),
        (["convert"], "missing argument `SOURCE`"),
        (["convert", "a", "--out", "b", "--bits", "3"], "no such option: --bits"),
        (
            ["convert", "a", "--out", "b", "--bpw", "x"],
            "invalid value for `--bpw`: Input should be",
        ),
        (["server", "sideways"], "no such command `sideways`"),
    ],
)
def test_wrong_usage_has_the_form_of_other_errors(words: list[str], told: str) -> None:
    said = refused(*words)

    assert said.startswith(f"error: {told}")
    assert BOX not in said
    commands = [word for word in words[:1] if word != "convrt"]
    assert said.splitlines()[-1] == f"see `{' '.join(['exl2flow', *commands])} --help`"


@pytest.mark.parametrize("words", [[], ["server"]])
def test_no_arguments_print_help_and_no_error(words: list[str]) -> None:
    result = CliRunner().invoke(app, words)

    assert result.exit_code == 2
    assert "Usage: exl2flow" in result.output
    assert "error" not in result.stderr


@pytest.mark.parametrize("bits", ["9", "3.5,9"])
def test_a_refused_number_is_named_as_it_was_given(bits: str) -> None:
    command = "sweep" if "," in bits else "convert"

    assert "`--bpw` is 9: " in refused(command, "a", "--out", "b", "--bpw", bits)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["convert", "a", "--out", "b", "--bpw", "9"], "ConfigError"),
        (["convert", "a", "--out", "b", "--bpw", "x"], "Usage"),
        (["inspect"], "Usage"),
    ],
)
def test_with_json_an_error_is_one_object_on_stderr(words: list[str], kind: str) -> None:
    said = json.loads(refused(*words, "--json"))

    assert said["exit_code"] == 2
    assert said["error"]["type"] == kind
    assert said["error"]["message"][0] in "`im"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("`x` is [wrong]"), 2),
        (PreflightFailed("first\nsecond"), 1),
        (MemoryError(), 1),
        (Interrupted("stopped", signum=15), 143),
        (KeyboardInterrupt(), 130),
    ],
)
def test_with_json_every_way_to_end_is_an_object(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as leaving, explained(["convert", "a", "--json"]):
        raise error

    said = json.loads(capsys.readouterr().err)
    assert said["exit_code"] == code == leaving.value.exit_code


def test_with_json_a_defect_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    explain_defect(ValueError("odd"), ["inspect", "a", "--json"])

    assert json.loads(capsys.readouterr().err)["error"]["type"] == "Unexpected"


def test_with_json_a_termination_is_an_object() -> None:
    assert json.loads(termination(143, ["convert", "a", "--json"]))["exit_code"] == 143
    assert termination(143, ["inspect", "a"]) == "terminated"
