"""Text rows for validation."""

import logging
from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from exl2flow.core.errors import CalibrationError, NotEnoughRows
from exl2flow.inference.scoring.text import text_rows
from exl2flow.model import Tokenizer

TEXT = "Numbers such as 3.14 and 42, names such as Ada.\n" * 30


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tiny("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_rows_are_consecutive_pieces_without_bos(path: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)

    rows = text_rows(path, tokenizer, rows=3, row_tokens=20)

    assert rows.dtype == torch.int64
    assert rows.shape == (3, 20)
    assert rows.flatten().tolist() == ids[:60]
    assert tokenizer.bos_token_id not in ids


def test_short_text_gives_fewer_rows_and_says_so(
    path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    whole = len(tokenizer.encode(TEXT)) // 50

    with caplog.at_level(logging.INFO):
        rows = text_rows(path, tokenizer, rows=10_000, row_tokens=50)

    assert rows.shape == (whole, 50)
    assert f"text has {whole} rows of 50 tokens, 10000 were requested" in caplog.text


def test_text_shorter_than_a_row_is_refused_with_the_way_out(
    path: Path, tokenizer: Tokenizer
) -> None:
    count = len(tokenizer.encode(TEXT))

    with pytest.raises(NotEnoughRows, match=rf"has {count} tokens, .* to {count} or less"):
        text_rows(path, tokenizer, rows=1, row_tokens=count + 1)
    assert text_rows(path, tokenizer, rows=1, row_tokens=count).shape == (1, count)


@pytest.mark.parametrize("content", [None, b"caf\xe9 in Latin-1"])
def test_file_that_is_no_text_is_named(
    content: bytes | None, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    if content is not None:
        (tmp_path / "mine.txt").write_bytes(content)

    with pytest.raises(CalibrationError, match=r"mine\.txt` as UTF-8 text"):
        text_rows(tmp_path / "mine.txt", tokenizer, rows=1, row_tokens=4)


def test_held_out_text_is_the_default(tokenizer: Tokenizer) -> None:
    rows = text_rows(None, tokenizer, rows=2, row_tokens=512)

    assert rows.shape == (2, 512)
    assert len(rows.unique()) > 50
    assert len(tokenizer.decode(rows[0].tolist()).split()) > 50
