"""What a shell is given to complete a command line: commands, options, values."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.cli.options.setting import words_in
from exl2flow.cli.output.help import BRIEF

COMMANDS = sorted(getattr(typer.main.get_command(app), "commands"))  # noqa: B009  # of a group


def completed(line: str, shell: str = "bash") -> list[str]:
    """Return what the last word of a line may become, in the form of a shell."""
    words = line.split(" ")
    variables = {
        "_EXL2FLOW_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = CliRunner().invoke(app, [], env=variables)
    assert done.exit_code == 0, done.output
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("exl2flow conv", ["convert"]),
        ("exl2flow server st", ["status"]),
        ("exl2flow convert --quality ", ["fast", "standard", "best", "exllamav2"]),
        ("exl2flow convert --quality e", ["exllamav2"]),
        ("exl2flow bench --device ", ["auto", "cpu", "cuda"]),
        ("exl2flow generate --draft ", ["mtp"]),
        ("exl2flow generate --cache q", ["q8", "q8/q6", "q8/q4", "q6", "q6/q4", "q4"]),
        ("exl2flow convert --validate-row", ["--validate-rows", "--validate-row-tokens"]),
        ("exl2flow convert ", []),  # then the shell completes files
        ("exl2flow convert --out ", []),
    ],
)
def test_the_last_word_is_completed(line: str, words: list[str]) -> None:
    assert completed(line) == words


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_completed_with_its_help_in_one_line(command: str) -> None:
    inner = " up" if command == "server" else ""

    lines = completed(f"exl2flow {command}{inner} --", "fish")

    names = [line.partition("\t")[0] for line in lines]
    assert "--help" in names
    assert all(name.startswith("--") for name in names)
    assert all(0 < len(line.partition("\t")[2]) <= BRIEF for line in lines)


def test_zsh_gets_words_with_their_help_and_apostrophes_that_it_does_not_drop() -> None:
    (ratio,) = completed("exl2flow validate --warn", "zsh")
    (line,) = completed("exl2flow clean --keep", "zsh")

    assert line.startswith('_arguments \'*: :(("--keep-latest":"Finished conversions')
    assert "multiple of the source’s." in ratio


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.slow
def test_the_script_for_bash_completes_in_bash() -> None:
    program = Path(sys.executable).with_name("exl2flow")
    script = (
        'eval "$(exl2flow --show-completion)"\n'
        "COMP_WORDS=(exl2flow con) COMP_CWORD=1\n"
        '_exl2flow_completion exl2flow con exl2flow && echo "${COMPREPLY[*]}"\n'
        "complete -p exl2flow\n"
    )

    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.stdout.splitlines() == [
        "convert",
        "complete -o default -F _exl2flow_completion exl2flow",
    ]
    assert done.stderr == ""


def test_completion_needs_neither_torch_nor_prefect() -> None:
    script = (
        "import os, sys; sys.argv = ['exl2flow']\n"
        "from exl2flow.cli.main import main\n"
        "os.environ |= {'_EXL2FLOW_COMPLETE': 'complete_bash', 'COMP_CWORD': '2'}\n"
        "os.environ['COMP_WORDS'] = 'exl2flow convert --quality'\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'prefect', 'pandas'} & set(sys.modules)))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout == "--quality\n[]\n"


@pytest.mark.parametrize(
    ("metavar", "words"),
    [
        ("auto|cpu|cuda", ["auto", "cpu", "cuda"]),
        ("MODEL|mtp", ["mtp"]),
        ("GB,…|auto", ["auto"]),
        ("FILE|JSON", []),
        ("NAME", []),
        ("name", []),
        (None, []),
    ],
)
def test_values_are_the_small_words_of_a_metavar(metavar: str | None, words: list[str]) -> None:
    assert words_in(metavar) == words
