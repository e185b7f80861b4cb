"""Tokenizers of the two kinds that decode differently."""

from pathlib import Path

import pytest
from spelled import sentencepiece_tokenizer
from tiny import tiny_tokenizer

from exl2flow.model import Tokenizer


@pytest.fixture(params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "sentencepiece":
        return sentencepiece_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer())
    return Tokenizer.load(tmp_path)
