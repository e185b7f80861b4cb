"""The table of levers names options that exist, and every line means something."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from ablation import TABLES, Result, Trial, configure, lines_of, print_table

LINES = [(table, line) for table, lines in TABLES.items() for line in lines]


@pytest.fixture
def arguments(tmp_path: Path) -> Namespace:
    return Namespace(
        model=tmp_path / "model",
        work=tmp_path / "work",
        text=None,
        text_rows=2,
        device="cpu",
        bpw=[3.0],
        only=None,
        set={},
    )


@pytest.mark.parametrize(("table", "line"), LINES)
def test_a_line_is_a_valid_configuration(arguments: Namespace, table: str, line: str) -> None:
    config = configure(arguments, Trial(table=table, line=line, seed=7, bpw=3.0))

    assert (config.calibration.seed, config.sensitivity.seed, config.tune.seed) == (7, 7, 7)
    assert config.bpw == 3.0


@pytest.mark.parametrize("table", TABLES)
def test_every_line_differs_from_the_reference(arguments: Namespace, table: str) -> None:
    assert lines_of(table, arguments) == list(TABLES[table])


def test_a_line_that_changes_nothing_is_left_out(arguments: Namespace) -> None:
    arguments.set = {"tune.steps": "0"}

    assert "no tuning" not in lines_of("best", arguments)
    assert "grid search" in lines_of("best", arguments)


def test_conversions_have_folders_of_their_own() -> None:
    trials = [
        Trial(table=table, line=line, seed=seed, bpw=bpw)
        for table, line in LINES
        for seed in (0, 1)
        for bpw in (3.0, 3.5)
    ]

    assert len({trial.name for trial in trials}) == len(trials)


def test_ratios_are_taken_seed_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    divergences = {("exllamav2", 0): 1.0, ("exllamav2", 1): 2.0}
    divergences |= {("damping 0.05", 0): 0.5, ("damping 0.05", 1): 1.0}
    results = {
        Trial(table="alone", line=line, seed=seed, bpw=3.0): Result(kl=kl, seconds=4)
        for (line, seed), kl in divergences.items()
    }

    print_table("alone", results, [0, 1], [3.0])

    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "| damping 0.05 | 0.75000 ± 0.35355 | 0.500 ± 0.000 | 4 |"
