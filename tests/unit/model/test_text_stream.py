import io
from pathlib import Path

import pytest
import sentencepiece
from tiny import TEXT, tiny_tokenizer

from exl2flow.model import TextStream, Tokenizer

TEXTS = (
    "The quick brown fox.",
    "你好, 🙂👩‍👩‍👧 and naïve",
    "  spaces\n\tand lines\n",
)


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


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_decoded_text(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)

    pieces = [stream.push(token_id) for token_id in ids]

    assert "".join(pieces) + stream.flush() == text


@pytest.mark.parametrize("prompt", range(12))
def test_text_continues_the_prompt(prompt: int, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("A tokenizer needs no more than a few sentences")
    stream = TextStream(tokenizer, ids[:prompt])

    pieces = "".join(map(stream.push, ids[prompt:]))

    assert tokenizer.decode(ids[:prompt]) + pieces == tokenizer.decode(ids)


def test_incomplete_characters_are_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂")
    stream = TextStream(tokenizer)

    pieces = [stream.push(token_id) for token_id in ids]

    assert pieces[-1].endswith("🙂")
    assert not any("\ufffd" in piece for piece in pieces)


def test_flush_shows_what_never_became_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂")
    stream = TextStream(tokenizer)

    pieces = [stream.push(token_id) for token_id in ids[:-1]]

    assert not any(pieces)
    assert set(stream.flush()) == {"\ufffd"}
    assert stream.flush() == ""
