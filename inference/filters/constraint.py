"""State of one text under one or several filters: allowed tokens, and whether it may end."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch

from exl2flow.core.errors import FilterDeadEnd
from exl2flow.core.requests.request import Filter
from exl2flow.inference.sampling.bits import all_but, words_of
from exl2flow.model import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """Tokens that may follow a text.

    words: int32 (ceil(width / 32),), read-only mask of the ids that may be sampled, as in
        `sampling/bits.py`; None: all. ends: ids that end the text when they are sampled.
    may_end, must_end: whether the text may end before another token, and whether it must.
    """

    words: torch.Tensor | None
    ends: frozenset[int] = frozenset()
    may_end: bool = False
    must_end: bool = False


class Constraint(Protocol):
    """State of one text. After a token that was not allowed, roll back before the next one."""

    def allowed(self) -> Allowed: ...
    def accept(self, token: int) -> None: ...
    def rollback(self, count: int) -> None: ...


class Combined:
    """One text under several filters: all must allow a token; any of them may end the text."""

    def __init__(
        self,
        filters: Sequence[Filter],
        tokenizer: Tokenizer,
        width: int,
        *,
        prefix: str = "",
        prefer_end: bool = False,
    ) -> None:
        """Start the filters; `prefer_end`: end the text as soon as they do not forbid it."""
        self._filters, self._tokenizer, self._width = filters, tokenizer, width
        self.parts: list[Constraint] = [given.start(tokenizer, width, prefix) for given in filters]
        everything = words_of(torch.arange(width).numpy(), width)
        self._going_on = everything & ~words_of(tokenizer.eos_token_ids, width)
        self._ids, self._fed, self._prefer_end = list[int](), list[bool](), prefer_end

    def allowed(self, only: Iterable[int] | None = None, blocked: Collection[int] = ()) -> Allowed:
        """Return the allowed tokens after the accepted ones, among `only` and without `blocked`.

        Raises `FilterDeadEnd` if there is none, and the text may not end.
        """
        parts = [part.allowed() for part in self.parts]
        masks = [part.words for part in parts if part.words is not None]
        may_end = all(part.may_end for part in parts)
        must_end = any(part.must_end for part in parts) or (self._prefer_end and bool(masks))
        masks += [] if only is None else [words_of(only, self._width)]
        masks += [all_but(frozenset(blocked), self._width)] if blocked else []
        words = reduce(torch.bitwise_and, masks) if masks else None
        if words is not None and not (words & self._going_on).any():
            must_end = True
            if not may_end:
                who = " and ".join(f"`{repr(given)[:60]}`" for given in self._filters)
                who += " and the bans" if blocked else ""
                text = self._tokenizer.decode(self._ids)[-60:]
                raise FilterDeadEnd(f"no token is left by {who} after {text!r}; change them")
        ends = frozenset[int]().union(*(part.ends for part in parts))
        return Allowed(words, ends, may_end, may_end and must_end)

    def accept(self, token: int, *, fed: bool = True) -> None:
        """Append a token, the healed one included; the filters see it if it is `fed`."""
        self._ids.append(token)
        self._fed.append(fed)
        for part in self.parts if fed else ():
            part.accept(token)

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        length = len(self._ids) - count
        count = sum(self._fed[length:])
        del self._ids[length:], self._fed[length:]
        for part in self.parts:
            part.rollback(count)
