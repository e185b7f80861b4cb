"""Commands take names of models on the Hub where they take folders."""

import json
import shutil
from pathlib import Path

import pytest
from hub_server import Hub, is_large
from typer.testing import CliRunner, Result

from exl2flow.cli.main import app

REPO = "org/tiny-exl2"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, and a home of its own."""
    for variable in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def bitrates(hub: Hub, converted: list[Path]) -> list[str]:
    """The converted models, on a branch each; their commits."""
    hub.create(REPO)
    return [
        hub.commit(
            REPO,
            folder.name,
            {
                path.name: hub.entry(path.read_bytes(), is_lfs=is_large(path.name))
                for path in folder.iterdir()
                if path.is_file()
            },
        )
        for folder in converted
    ]


def run(*words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, list(words), input=text)


def test_generate_runs_a_model_by_name(bitrates: list[str], converted: list[Path]) -> None:
    options = ("--prompt", "The quick", "--max-new-tokens", "4", "--greedy", "--json")
    options = (*options, "--device", "cpu")

    by_name = run("generate", f"{REPO}:3", *options)
    by_folder = run("generate", str(converted[0]), *options)

    assert by_name.exit_code == 0, by_name.stderr
    assert json.loads(by_name.stdout)["tokens"] == json.loads(by_folder.stdout)["tokens"]
    assert f"fetching `{REPO}:3` (`3bpw` at commit {bitrates[0][:8]}" in by_name.stderr
    assert "MiB of org/tiny-exl2" in by_name.stderr


def test_inspect_shows_a_model_by_name(bitrates: list[str]) -> None:
    done = run("inspect", f"{REPO}@6bpw", "--json")

    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["bpw"] == pytest.approx(6.0, abs=0.3)


def test_validate_labels_models_by_their_names(bitrates: list[str], place: Path) -> None:
    text = place / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    options = ("--text", str(text), "--rows", "1", "--row-tokens", "32", "--device", "cpu")

    done = run("validate", f"{REPO}:3.0", f"{REPO}:6.0", *options)

    assert done.exit_code == 0, done.stderr
    assert "tiny-exl2:3.0" in done.stdout
    assert "tiny-exl2:6.0" in done.stdout
    assert [path.name for path in place.iterdir()] == ["text.txt"]


def test_a_chat_remembers_by_the_name(
    hub: Hub, bitrates: list[str], converted: list[Path], tmp_path: Path
) -> None:
    words = ("chat", f"{REPO}:3.0", "--resume", "--max-answer", "4", "--json", "--device", "cpu")
    words = (*words, "--format", "chatml")
    first = run(*words, text="Hello")
    assert first.exit_code == 0, first.stderr
    tree = hub.repos[REPO]["commits"][bitrates[0]]
    hub.commit(REPO, "3bpw", tree | {"NOTICE": hub.entry(b"moved", is_lfs=False)})

    second = run(*words, text="Bye")

    assert second.exit_code == 0, second.stderr
    [file] = (tmp_path / "XDG_STATE_HOME" / "exl2flow" / "chats").glob("*.json")
    assert file.name.startswith("tiny-exl2:3.0-")
    assert "Hello" in file.read_text()
    assert "Bye" in file.read_text()


def test_several_and_none_are_errors_without_a_traceback(bitrates: list[str]) -> None:
    several = run("bench", REPO)
    none = run("bench", f"{REPO}:5.0", "--json")

    assert several.exit_code == none.exit_code == 1
    assert f"error: `{REPO}` may be one of 2 EXL2 models; type one of" in several.stderr
    assert f"\n  {REPO}:3.0  3.00 bits per weight  " in several.stderr
    error = json.loads(several_lines := none.stderr.splitlines()[-1])["error"]
    assert error["type"] == "SourceModelError", several_lines
    assert f"`{REPO}` has no EXL2 model `5.0`; it has:\n  {REPO}:6.0" in error["message"]


def test_a_folder_of_that_name_wins_and_a_line_says_so(
    hub: Hub, bitrates: list[str], converted: list[Path]
) -> None:
    shutil.copytree(converted[0], REPO)
    hub.requests.clear()

    done = run("inspect", REPO, "--json")

    assert done.exit_code == 0, done.stderr
    assert done.stderr == f"`{REPO}` is a folder here and is used, not a model on the Hub\n"
    assert not hub.requests


def test_a_mistyped_path_is_not_looked_for_on_the_hub(hub: Hub) -> None:
    Path("org").mkdir()

    done = run("inspect", "org/tiny")

    assert done.exit_code == 1
    assert "no folder `org/tiny`, but `org` is one; correct the path, or write" in done.stderr
    assert not hub.requests


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--swap",), "`--swap` goes with `--models` or `--also`"),
        (("--also", "twin/tiny"), "and another model are both named `tiny`; rename one"),
    ],
)
def test_a_server_refuses_what_does_not_go_together(
    converted: list[Path], words: tuple[str, ...], message: str
) -> None:
    for folder in ("own/tiny", "twin/tiny"):
        shutil.copytree(converted[0], folder)

    done = run("serve", "own/tiny", *words)

    assert done.exit_code == 2
    assert message in done.stderr
