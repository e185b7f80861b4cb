"""The table of models and GPUs has the verdicts of plans, and is the one that the docs show."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import small_cards

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "gpu.md"


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["small_cards.py", *words])
    small_cards.main()
    return capsys.readouterr().out.splitlines()


def test_the_docs_show_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = printed(monkeypatch, capsys)

    assert len(table) == 2 + len(small_cards.MODELS)
    assert "\n".join(table) in PAGE.read_text(encoding="utf-8")


def test_options_choose_rows_columns_and_the_preset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--shapes", "32b", "7b", "--sizes", "16", "80", "--quality", "exllamav2")

    table = printed(monkeypatch, capsys, *words)

    assert table == [
        "| model | 16 GB | 80 GB | RAM |",
        "|---|---|---|---|",
        "| 32b | perhaps rs | yes | 27 GB |",
        "| 7b | yes | yes | 11 GB |",
    ]
