"""Tokenizers of the two kinds that decode differently."""

import io
from pathlib import Path

import pytest
import sentencepiece
from tiny import TEXT, tiny_tokenizer

from exl2flow.model import Tokenizer


@pytest.fixture(params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "byte-level":
        (tmp_path / "tokenizer.json").write_text(tiny_tokenizer())
        return Tokenizer.load(tmp_path)
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 3),
        model_writer=buffer,
        vocab_size=360,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(buffer.getvalue())
    return Tokenizer.load(tmp_path)
