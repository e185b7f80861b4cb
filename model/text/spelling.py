"""The bytes that each token id adds to a text, and which tokens spell a given text."""

import re
from bisect import bisect_left
from functools import lru_cache

from exl2flow.model.text.pieces import BYTES, REPLACEMENT
from exl2flow.model.text.tokenizer import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece names a byte


class Spelling:
    """A tokenizer's ids by their bytes; immutable. 152k ids take about 0.05 s.

    of: by id, its bytes, folded on request; empty for special tokens. alone: the bytes that are a
    token by themselves.
    """

    def __init__(self, tokenizer: Tokenizer, *, folds: bool = False) -> None:
        """Take over the pieces; `folds`: without differences between upper and lower case."""
        name = tokenizer.backend.id_to_token
        of = [
            _bytes_of(name(token)) if REPLACEMENT in piece else piece.encode()
            for token, piece in enumerate(tokenizer.pieces)
        ]
        self.of = [folded(key) for key in of] if folds else of
        self._ids = sorted(filter(self.of.__getitem__, range(len(of))), key=self.of.__getitem__)
        self._keys = [self.of[token] for token in self._ids]
        self.alone = frozenset(key[0] for key in self._keys if len(key) == 1)

    def tokens(self, text: bytes, *, overshoots: bool = False) -> list[tuple[int, list[int]]]:
        """Return the ids that spell a beginning of a text, by its length in bytes.

        With `overshoots`, ids that begin with the whole text belong to its full length.
        """
        by_length = list[tuple[int, list[int]]]()
        low, high = 0, len(self._keys)
        for count in range(1, len(text) + 1):
            key = text[:count]
            low = bisect_left(self._keys, key, low, high)
            high = bisect_left(self._keys, key[:-1] + bytes([key[-1] + 1]), low, high)
            if low == high:
                break
            same = high if overshoots and count == len(text) else low
            while same < high and len(self._keys[same]) == count:
                same += 1
            if same > low:
                by_length.append((count, self._ids[low:same]))
        return by_length

    def places(self, text: bytes, *, overshoots: bool = False) -> set[int]:
        """Return the places in a text from which tokens spell its rest, its end included."""
        places = {*range(len(text) + 1)}
        if not self.alone.issuperset(text):
            for place in reversed(range(len(text))):
                steps = self.tokens(text[place:], overshoots=overshoots)
                if not any(place + count in places for count, _ in steps):
                    places.remove(place)
        return places


spelling_of = lru_cache(4)(Spelling)  # of a tokenizer


def folded(text: bytes) -> bytes:
    """Return UTF-8, which may be incomplete, without differences between upper and lower case."""
    return text.decode(errors="surrogateescape").casefold().encode(errors="surrogateescape")


def _bytes_of(name: str | None) -> bytes:
    """Return the bytes of a token that is not valid UTF-8, from its name; empty if unknown."""
    if name is None:
        return b""
    if named := BYTE_TOKEN.fullmatch(name):
        return bytes.fromhex(named[1])
    return bytes(BYTES[c] for c in name) if all(c in BYTES for c in name) else b""
