"""Tokenizers of several kinds."""

from pathlib import Path

import pytest
from spelled import sentencepiece_tokenizer

from exl2flow.model import Tokenizer


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    return Tokenizer.load(Path(__file__).parents[4] / "demo" / "model")


@pytest.fixture(scope="session")
def by_sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece_tokenizer(tmp_path_factory.mktemp("sentencepiece"))
