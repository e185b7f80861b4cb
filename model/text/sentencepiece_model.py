"""A SentencePiece model file as plain data.

Reads the few fields that matter from the protobuf wire format, because the generated module in
`sentencepiece` accepts only a narrow range of protobuf versions.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from exl2flow.core import words
from exl2flow.core.errors import SourceModelError

Value = int | bytes
LONGEST_VARINT = 10  # bytes: 64 bits, seven to a byte
LONGEST_PIECE = 4096  # bytes; trainers stop at 16 characters, and splitting is quadratic
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


class ModelType(IntEnum):
    """`TrainerSpec.ModelType`."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


class PieceType(IntEnum):
    """`ModelProto.SentencePiece.Type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabPiece:
    """One vocabulary entry; its id is its position."""

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceModel:
    """The content of a `tokenizer.model`; `charsmap` is a compiled normalization or empty."""

    serialized: bytes
    type: ModelType
    pieces: tuple[VocabPiece, ...]
    byte_fallback: bool
    whitespace_suffix: bool
    charsmap: bytes
    dummy_prefix: bool
    remove_extra_whitespace: bool
    escape_whitespace: bool

    @classmethod
    def load(cls, path: Path) -> "SentencePieceModel":
        """Read the file.

        Raises:
            SourceModelError: it cannot be read or is not a SentencePiece model.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SourceModelError(f"cannot read `{path}`: {error.strerror}") from error
        try:
            model = cls._parse(data)
        except (IndexError, ValueError, KeyError, TypeError, struct.error) as error:
            raise SourceModelError(
                f"`{path}` is not a SentencePiece model ({words.cause(error)}); fetch it again"
            ) from error
        if not model.pieces:
            raise SourceModelError(f"`{path}` holds no pieces; fetch it again")
        return model

    @classmethod
    def _parse(cls, data: bytes) -> "SentencePieceModel":
        """Read `ModelProto`; the numbers are those of `sentencepiece_model.proto`."""
        pieces: list[VocabPiece] = []
        trainer: dict[int, Value] = {}
        normalizer: dict[int, Value] = {}
        for number, value in _fields(data):
            match number, value:
                case 1, bytes():
                    pieces.append(_piece(dict(_fields(value))))
                case 2, bytes():
                    trainer = dict(_fields(value))
                case 3, bytes():
                    normalizer = dict(_fields(value))
        charsmap = _blob(normalizer, 2, b"")
        if charsmap:
            check_charsmap(charsmap)
        return cls(
            serialized=data,
            type=ModelType(_integer(trainer, 3, ModelType.UNIGRAM)),
            pieces=tuple(pieces),
            byte_fallback=bool(_integer(trainer, 35, 0)),
            whitespace_suffix=bool(_integer(trainer, 24, 0)),
            charsmap=charsmap,
            dummy_prefix=bool(_integer(normalizer, 3, 1)),
            remove_extra_whitespace=bool(_integer(normalizer, 4, 1)),
            escape_whitespace=bool(_integer(normalizer, 5, 1)),
        )


def check_charsmap(charsmap: bytes) -> None:
    """Compare the size that a compiled normalization states for its trie with its bytes.

    The Rust library reserves what is stated, up to 4 GB, and ends the process if it gets less.

    Raises:
        ValueError: it states more than there is.
    """
    stated = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) < 4 or stated % 4 or stated > len(charsmap) - 4:
        raise ValueError(f"a normalization of {len(charsmap)} bytes states a trie of {stated}")


def _piece(fields: dict[int, Value]) -> VocabPiece:
    text = _blob(fields, 1, b"")
    if len(text) > LONGEST_PIECE:
        raise ValueError(f"a piece of {len(text)} bytes")
    return VocabPiece(
        text=text.decode(),
        score=struct.unpack("<f", _blob(fields, 2, bytes(4)))[0],
        type=PieceType(_integer(fields, 3, PieceType.NORMAL)),
    )


def _integer(fields: dict[int, Value], number: int, default: int) -> int:
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise ValueError(f"field {number} is not an integer")
    return value


def _blob(fields: dict[int, Value], number: int, default: bytes) -> bytes:
    value = fields.get(number, default)
    if not isinstance(value, bytes):
        raise ValueError(f"field {number} has no bytes")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yield (field number, value) of a protobuf message; fixed-size values as bytes."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        wire_type = tag & 7
        if wire_type == _VARINT:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if wire_type == _BYTES:
            size, position = _varint(data, position)
        else:
            size = {_FIXED64: 8, _FIXED32: 4}[wire_type]
        if position + size > len(data):
            raise ValueError("a field ends after the file")
        yield tag >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a base-128 integer and the position after it."""
    value = 0
    for count in range(LONGEST_VARINT):
        byte = data[position + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, position + count + 1
    raise ValueError(f"an integer of more than {LONGEST_VARINT} bytes")
