"""Scores that several processes share are those of one."""

from pathlib import Path

import pytest
from tiny import make_tiny

from exl2flow.core.errors import CalibrationError
from exl2flow.core.options.validation import ValidateOptions
from exl2flow.inference.validate.compare import compare

OPTIONS = ValidateOptions(rows=5, row_tokens=32)
TWO = ("cpu", "cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_tiny("llama", root / f"seed-{seed}", seed=seed) for seed in range(2)]


def test_two_processes_score_as_one(models: list[Path]) -> None:
    seen = list[tuple[int, int, str]]()

    def advance(done: int, total: int, detail: str) -> None:
        seen.append((done, total, detail))

    alone = compare(models, models[0], OPTIONS, places=("cpu",), advance=advance)
    whole, seen[:] = list(seen), []

    together = compare(models, models[0], OPTIONS, places=TWO, advance=advance)

    assert together == alone
    assert together[1].rows.tokens == (31,) * 5
    assert seen[-1] == whole[-1]


def test_what_all_refuse_is_said_once(models: list[Path]) -> None:
    options = OPTIONS.model_copy(update={"text": Path("/absent.txt")})

    with pytest.raises(CalibrationError, match="cannot read"):
        compare(models, None, options, places=TWO, advance=lambda *tick: None)
