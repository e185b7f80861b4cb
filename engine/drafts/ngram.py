"""Draft tokens from n-grams: the tokens after an earlier occurrence of the last few."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from exl2flow.engine.drafts.proposer import MOST_DRAFTED, DraftRequest, check

WIDTH = array("q").itemsize
SHORTEST = 2  # tokens that must have occurred; one alone is a bad guide
REREAD = 64  # tokens at the end of a text that a rewind may have exchanged


@dataclass(frozen=True, slots=True)
class NgramDraft:
    """Proposes the tokens that followed the latest occurrence of a text's last n tokens.

    tokens: the most draft tokens per step; longest: the first n to look for; then fewer, down to
    two. Raises `ConfigError` for a number out of range.
    """

    tokens: int = 4
    longest: int = 4

    def __post_init__(self) -> None:
        check("tokens", self.tokens, 1, MOST_DRAFTED)
        check("longest", self.longest, SHORTEST, REREAD)

    def start(self, *_: object) -> "NgramProposer":
        return NgramProposer(self.longest)


class NgramProposer:
    """Keeps the ids of each text as bytes, which `bytearray.rfind` searches fast."""

    decoder = None
    stored = ()

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._texts = WeakKeyDictionary[object, bytearray]()

    def read(self, *_: object) -> None: ...
    def copy(self, *_: object) -> None: ...

    def propose(self, requests: Mapping[int, DraftRequest]) -> dict[int, list[int]]:
        return {slot: self._draft(request) for slot, request in requests.items()}

    def _draft(self, request: DraftRequest) -> list[int]:
        if not request.most:
            return []
        text = self._texts.setdefault(request.owner, bytearray())
        unchanged = max(0, min(len(text) // WIDTH, len(request.ids)) - REREAD)
        text[unchanged * WIDTH :] = array("q", request.ids[unchanged:]).tobytes()
        if (begin := self._earlier(text)) is None:
            return []
        period = array("q", bytes(text[begin : begin + request.most * WIDTH]))
        return [period[i % len(period)] for i in range(request.most)]  # it may repeat itself

    def _earlier(self, text: bytearray) -> int | None:
        """Return the byte after the latest earlier occurrence of the text's last tokens."""
        for count in range(min(self._longest, len(text) // WIDTH - 1), SHORTEST - 1, -1):
            size = count * WIDTH
            end, last = len(text) - WIDTH, bytes(text[-size:])
            while (begin := text.rfind(last, 0, end)) >= 0:
                if begin % WIDTH == 0:
                    return begin + size
                end = begin + size - 1
        return None
