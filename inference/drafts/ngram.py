"""Drafts without a model: what followed when the last few tokens occurred before."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from exl2flow.inference.drafts.proposer import MOST_DRAFTED, DraftRequest, check

WIDTH = array("q").itemsize
SHORTEST = 2  # tokens that must have occurred; one alone is a bad guide
REREAD = 64  # tokens at the end of a text that a rewind may have exchanged


@dataclass(frozen=True, slots=True)
class NgramDraft:
    """Guesses that a text goes on as it did after the latest occurrence of its last tokens.

    tokens: the most draft tokens per step; longest: so many tokens, or else fewer, down to
    two, must have occurred before. Raises `ConfigError` for a number out of range.
    """

    tokens: int = 4
    longest: int = 4

    def __post_init__(self) -> None:
        check("tokens", self.tokens, 1, MOST_DRAFTED)
        check("longest", self.longest, SHORTEST, REREAD)

    def start(self, *_: object) -> "NgramGuesses":
        return NgramGuesses(self.longest)


class NgramGuesses:
    """Keeps the ids of each text as bytes, which are searched in no time."""

    decoder = None

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._texts = WeakKeyDictionary[object, bytearray]()

    def read(self, *_: object) -> None: ...
    def copy(self, *_: object) -> None: ...

    def propose(self, wanted: Mapping[int, DraftRequest]) -> dict[int, list[int]]:
        return {slot: self._follow(one) for slot, one in wanted.items()}

    def _follow(self, one: DraftRequest) -> list[int]:
        if not one.most:
            return []
        text = self._texts.setdefault(one.owner, bytearray())
        kept = max(0, min(len(text) // WIDTH, len(one.ids)) - REREAD)
        text[kept * WIDTH :] = array("q", one.ids[kept:]).tobytes()
        if (begin := self._earlier(text)) is None:
            return []
        period = array("q", bytes(text[begin : begin + one.most * WIDTH]))
        return [period[i % len(period)] for i in range(one.most)]  # it may repeat itself

    def _earlier(self, text: bytearray) -> int | None:
        """Return the place behind the latest occurrence of the text's last tokens."""
        for count in range(min(self._longest, len(text) // WIDTH - 1), SHORTEST - 1, -1):
            size = count * WIDTH
            end, last = len(text) - WIDTH, bytes(text[-size:])
            while (place := text.rfind(last, 0, end)) >= 0:
                if place % WIDTH == 0:
                    return place + size
                end = place + size - 1
        return None
