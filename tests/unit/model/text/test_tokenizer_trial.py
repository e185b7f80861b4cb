import subprocess
from pathlib import Path

import pytest
from tiny import tiny_tokenizer

from exl2flow.core.errors import SourceModelError
from exl2flow.model import Tokenizer
from exl2flow.model.text import tokenizer_trial

CORPUS = Path(__file__).parents[3] / "corpus" / "tokenizer-json"
ENDING = CORPUS / "charsmap-of-4-gb-escaped-key.json"  # it aborts the process


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EXL2FLOW_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer())
    return tmp_path


def test_a_file_that_ends_the_process_is_refused_each_time(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(ENDING.read_bytes())

    for _ in range(2):
        with pytest.raises(SourceModelError, match=r"tokenizer\.json` makes the library .* crash"):
            Tokenizer.load(folder)

    assert not (folder / "cache").exists()


def test_a_file_is_tried_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tokenizer.load(folder)
    monkeypatch.setattr(subprocess, "run", None)  # would raise

    again = Tokenizer.load(folder)

    assert again.vocab_size > 0
    assert len([*(folder / "cache" / "tokenizers").iterdir()]) == 1


def test_a_changed_file_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text(tiny_tokenizer() + " ")

    Tokenizer.load(folder)

    assert len([*(folder / "cache" / "tokenizers").iterdir()]) == 2


def test_without_a_place_to_remember_it_a_file_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "cache").write_text("in the way")

    assert Tokenizer.load(folder).encode("text")

    monkeypatch.setattr(tokenizer_trial, "cache_folder", lambda: None)
    assert Tokenizer.load(folder).encode("text")
