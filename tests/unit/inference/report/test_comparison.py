import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_reports import SCORE
from tiny import make_tiny
from zeros import FOUR_BITS, zeros

from exl2flow.core.reports import RowSums, Score
from exl2flow.core.store.files import write_tensors
from exl2flow.core.store.stage import RECORD_FILE
from exl2flow.inference.report.comparison import (
    Compared,
    by_series,
    check_bitrates,
    compared,
    difference,
    differences,
)
from exl2flow.inference.scoring.intervals import intervals


def model(label: str, size: int, kl: float | None, **values: Any) -> Compared:
    defaults: dict[str, Any] = {"series": "standard", "bpw": 3.0, "predicted_kl": None}
    return Compared(label=label, bytes=size, kl=kl, **{**defaults, **values})


def score(folder: Path, kl: float = 0.5) -> Score:
    return Score(**{**SCORE, "model": str(folder), "kl_divergence": kl})


def exl2(folder: Path, quality: str | None = None) -> Path:
    """Write an EXL2 folder of one matrix; with a preset, one of ours."""
    folder.mkdir(parents=True)
    write_tensors(folder / "model.safetensors", zeros().to_tensors("model.layers.0.mlp.up_proj"))
    if quality is not None:
        record = {"options": {"quality": quality, "bpw": 4.0}, "predicted_kl": 0.25}
        (folder / RECORD_FILE).write_text(json.dumps(record))
    return folder


def test_models_are_described_by_their_folders(tmp_path: Path) -> None:
    folders = [
        exl2(tmp_path / "ours", "fast"),
        exl2(tmp_path / "theirs"),
        make_tiny("llama", tmp_path / "plain"),
    ]

    ours, theirs, plain = compared([score(folder) for folder in folders])

    bpw = FOUR_BITS.total_bits(64, 32) / (64 * 32)
    assert [m.label for m in (ours, theirs, plain)] == ["ours", "theirs", "plain"]
    assert [m.series for m in (ours, theirs, plain)] == ["fast", None, None]
    assert [m.bpw for m in (ours, theirs, plain)] == [bpw, bpw, None]
    assert [m.predicted_kl for m in (ours, theirs, plain)] == [0.25, None, None]


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [exl2(tmp_path / name / "3bpw") for name in ("fast", "best")]

    assert [m.label for m in compared([score(f) for f in folders])] == ["fast/3bpw", "best/3bpw"]


def test_a_model_given_twice_keeps_its_name(tmp_path: Path) -> None:
    folder = exl2(tmp_path / "3bpw")

    assert [m.label for m in compared([score(folder)] * 2)] == ["3bpw", "3bpw"]


def test_falling_divergence_is_said_of_each_series() -> None:
    models = [
        model("a", 10, 0.5),
        model("c", 30, 0.1),
        model("b", 20, 0.3),
        model("x", 15, 0.9, series="fast"),
        model("y", 25, 0.8, series="fast"),
    ]

    text, warnings = check_bitrates(models)

    assert text == "KL divergence falls as bytes rise: standard (3 models), fast (2 models)"
    assert warnings == []


def with_rows(found: Compared, *, text: str = "text", rows: int = 12) -> Compared:
    """Give a model rows whose divergences vary, with its divergence as their mean."""
    assert found.kl is not None
    factors = np.linspace(0.5, 1.5, rows)
    sums = RowSums(
        tokens=(100,) * rows,
        losses=(200.0,) * rows,
        divergences=tuple(100 * found.kl * factors),
        agreements=(90,) * rows,
    )
    known = replace(
        score(Path(found.label), found.kl), text=text, rows=sums, intervals=intervals(sums)
    )
    return replace(found, score=known)


SMALLER, LARGER = model("b", 20_000_000, 0.3), model("c", 30_000_000, 0.4)


def test_a_larger_model_that_surely_diverges_more_is_warned_of_beside_the_best_smaller() -> None:
    models = [with_rows(found) for found in (model("a", 10_000_000, 0.5), SMALLER, LARGER)]

    text, warnings = check_bitrates(models)

    assert text == ""
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "KL divergence rises with bytes: `c` has 0.40000 nats at 30.00 MB, "
        "`b` 0.30000 nats at 20.00 MB; 95 % interval of the difference 0.0"
    )


def test_a_rise_that_may_be_chance_is_said_but_not_warned_of() -> None:
    found = with_rows(LARGER)
    assert found.score is not None
    assert found.score.rows is not None
    shifted = np.roll(found.score.rows.divergences or (), 6)  # other rows are hard for this one
    rows = replace(found.score.rows, divergences=tuple(shifted))

    text, warnings = check_bitrates(
        [with_rows(SMALLER), replace(found, score=replace(found.score, rows=rows))]
    )

    assert warnings == []
    assert text.startswith("`c` diverges no less than the smaller `b`, but the 95 % interval")
    assert text.endswith("includes zero")


@pytest.mark.parametrize(
    "models",
    [
        [SMALLER, LARGER],  # of a version that did not record rows
        [with_rows(SMALLER, rows=7), with_rows(LARGER, rows=7)],
        [with_rows(SMALLER), with_rows(LARGER, text="another")],
        [with_rows(SMALLER), with_rows(LARGER, rows=9)],
    ],
)
def test_without_an_interval_a_rise_is_said_but_not_warned_of(models: list[Compared]) -> None:
    text, warnings = check_bitrates(models)

    assert warnings == []
    assert text == (
        "`c` diverges no less than the smaller `b`, but chance cannot be excluded, because there "
        "is no interval"
    )


def test_differences_are_taken_between_neighbours_of_a_series() -> None:
    models = [model("c", 30, 0.1), model("a", 10, 0.5), model("b", 20, 0.3)]
    others = [model("x", 15, 0.2, series="fast")]

    steps = differences([with_rows(each) for each in (*models, *others)])

    pairs = [(step.minus.label, step.model.label) for step in steps]
    assert pairs == [("a", "b"), ("b", "c")]
    found = difference(with_rows(models[0]), with_rows(models[1]))
    assert found is not None
    low, high = found.kl_divergence or (0, 0)
    assert low < 0.1 - 0.5 < high < 0


def test_differences_as_json_name_both_models_and_have_their_intervals() -> None:
    models = [
        with_rows(model(name, size, kl)) for name, size, kl in (("b", 20, 0.3), ("a", 9, 0.5))
    ]
    unknown = model("c", 30, 0.1)  # of a version that did not record rows

    (found,) = [d.to_json(lambda m: f"/{m.label}") for d in differences([*models, unknown])]

    assert (found["model"], found["minus"]) == ("/b", "/a")
    known = difference(*models)
    assert known is not None
    assert found["intervals"] == asdict(known)
    assert json.loads(json.dumps(found))["intervals"]["kl_divergence"][1] < 0


def test_series_are_not_compared_with_each_other() -> None:
    models = [model("best", 10, 0.1, series="best"), model("fast", 20, 0.5, series="fast")]

    assert check_bitrates(models) == ("", [])


@pytest.mark.parametrize(
    "models",
    [
        [model("one", 10, 0.1)],
        [model("a", 10, 0.1), model("b", 10, 0.2)],  # equal bytes say nothing
        [model("a", 10, None), model("b", 20, None)],  # no reference
        [model("a", 10, 0.1), model("plain", 20, 0.2, bpw=None)],
    ],
)
def test_where_nothing_can_be_compared_nothing_is_said(models: list[Compared]) -> None:
    assert check_bitrates(models) == ("", [])


def test_models_of_other_programs_are_one_series() -> None:
    models = [model("a", 10, 0.1, series=None), model("b", 20, 0.2, series=None)]

    assert list(by_series(models)) == [None]
    assert len(check_bitrates([with_rows(found) for found in models])[1]) == 1
