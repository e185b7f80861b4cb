"""Tokens whose text cannot be shown yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from exl2flow.inference.generate.event import Token
from exl2flow.model.text_stream import Place


@dataclass(slots=True)
class Pending:
    """A token, the text it completes, and the state before it.

    place: of the text stream; unhealed: characters still to drop.
    """

    token: Token
    text: str
    place: Place
    unhealed: int


def joined(tokens: Sequence[Pending]) -> str:
    """Return the text of several tokens."""
    return "".join([pending.text for pending in tokens])


def tokens_before(end: int, tokens: Sequence[Pending], *, fold: bool = False) -> int:
    """Return how many tokens end at or before a character of their joined (folded) text."""
    texts = (pending.text.casefold() if fold else pending.text for pending in tokens)
    return sum(stop <= end for stop in accumulate(map(len, texts)))
