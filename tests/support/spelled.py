"""Tokenizers for tests of text: one of any byte strings, and one that drops a leading space."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece
import tokenizers
from tiny import TEXT
from tokenizers import decoders, models

from exl2flow.model import Tokenizer

EOS = 0
PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))  # stand for themselves
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]  # stand at 256 and up


def spelled(pieces: Iterable[bytes | str]) -> tuple[Tokenizer, dict[bytes, int]]:
    """Return a byte-level tokenizer of these tokens, and their ids; id 0 is a special EOS."""
    ids = {b"": EOS}
    for piece in pieces:
        ids.setdefault(piece.encode() if isinstance(piece, str) else piece, len(ids))
    names = {_name(piece) if piece else "</s>": token_id for piece, token_id in ids.items()}
    backend = tokenizers.Tokenizer(models.WordLevel(names, unk_token="</s>"))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, bos_token_id=None, eos_token_ids=[EOS]), ids


def split(text: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Cut a byte string at the given places; none of the parts is empty."""
    places = sorted({cut % len(text) for cut in cuts} - {0}) if text else []
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True) if a < b]


def sentencepiece_tokenizer(folder: Path) -> Tokenizer:
    """Return a SentencePiece tokenizer with byte tokens, written into `folder`."""
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
    (folder / "tokenizer.model").write_bytes(buffer.getvalue())
    return Tokenizer.load(folder)


def _name(piece: bytes) -> str:
    return "".join(
        chr(byte) if byte in PRINTABLE else chr(256 + OTHERS.index(byte)) for byte in piece
    )
