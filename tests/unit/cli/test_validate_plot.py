"""`exl2flow validate`: its progress and JSON; of `--plot` what is refused, said and drawn."""

import json
import re
from pathlib import Path

import pytest
from tiny import make_tiny
from typer.testing import CliRunner, Result

from exl2flow.cli.main import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["validate", *map(str, arguments)])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "tiny", num_hidden_layers=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plot", "kl.svg"], "need the source; name it with `--reference`"),
        (["--plot", "kl.png", "--reference", "x"], "`.svg`"),
        (["--plot", "nowhere/kl.svg", "--reference", "x"], "existing folder"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_refused_at_once(arguments: list[str], words: str) -> None:
    result = run("model", *arguments)

    assert result.exit_code != 0
    assert words in result.stderr


def test_plot_is_written_where_asked(source: Path, tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "other", num_hidden_layers=1, seed=2)
    few = ("--rows", 1, "--row-tokens", 32, "--fail-ratio", 1000, "--reference", source)

    result = run(other, *few, "--plot", tmp_path / "kl.svg")

    assert result.exit_code == 0, result.output
    assert "other" in (tmp_path / "kl.svg").read_text()
    assert str(tmp_path / "kl.svg") in result.stderr


def test_progress_counts_the_sublayers_of_all_models_from_the_first_line_on(source: Path) -> None:
    result = run(source, "--rows", 1, "--row-tokens", 32, "--reference", source)

    counts = re.findall(r"^validate (\d+)/(\d+)", result.stderr, flags=re.MULTILINE)
    total = str(2 * 2)  # attention and MLP, of the model and of its source
    assert (counts[0], counts[-1]) == (("0", total), (total, total))
    assert {of for _, of in counts} == {total}


def test_json_has_the_difference_to_the_next_smaller_model(source: Path, tmp_path: Path) -> None:
    larger = make_tiny("llama", tmp_path / "larger", num_hidden_layers=2)
    options = ("--rows", 8, "--row-tokens", 32, "--fail-ratio", 1000, "--json")

    result = run(larger, source, "--reference", source, *options)

    assert result.exit_code == 0, result.output
    above, below = map(json.loads, result.stdout.splitlines())
    (found,) = above["differences"]
    assert (found["model"], found["minus"]) == (above["model"], below["model"])
    low, high = found["intervals"]["kl_divergence"]
    assert low < above["kl_divergence"] - below["kl_divergence"] < high
    assert below["differences"] == []
