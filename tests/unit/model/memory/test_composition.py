"""How many rows a model writes, and how many at once."""

from pathlib import Path

import pytest
from tiny import make_tiny

from exl2flow.core.options.config import CalibrationOptions
from exl2flow.model import Composition, ModelSpec, resolve
from exl2flow.model.memory import composition

TEXT_ELEMENTS = 2 * 2 * 2 * 16 * 64  # keys and values, 2 layers, 2 heads of 16, 64 tokens


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return resolve(make_tiny("llama", tmp_path / "model"))


def planned(spec: ModelSpec, **values: object) -> Composition:
    sizes = {"rows": 9, "row_tokens": 32, "measure_rows": 19, "measure_row_tokens": 64}
    options = CalibrationOptions.model_validate({"text": "self", **sizes, **values})
    return Composition.of(spec, options)


def test_rows_suffice_for_both_mixes(spec: ModelSpec) -> None:
    plan = planned(spec)

    assert (plan.rows, plan.tokens, plan.span, plan.at_once) == (10, 64, 64, 10)


def test_a_text_is_no_longer_than_the_positions(spec: ModelSpec) -> None:
    plan = planned(spec, row_tokens=608)

    assert (plan.tokens, plan.span, plan.in_row, plan.texts) == (608, 256, 3, 30)


@pytest.mark.parametrize(("room", "at_once"), [(100, 10), (3, 3), (0, 1)])
def test_texts_at_once_fit_the_cache(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, room: int, at_once: int
) -> None:
    monkeypatch.setattr(composition, "CACHE_ELEMENTS", room * TEXT_ELEMENTS + 7)

    assert planned(spec).at_once == at_once
