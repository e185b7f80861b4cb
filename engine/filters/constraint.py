"""State of one text under one or several filters: allowed tokens, and whether it may end."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol

import torch

from exl2flow.core.errors import FilterDeadEnd
from exl2flow.core.requests.request import Filter
from exl2flow.engine.sampling.bits import all_but, words_of
from exl2flow.model import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """Tokens that may follow a text.

    words: int32 (ceil(width / 32),), read-only mask of the ids that may be sampled, as in
        `sampling/bits.py`; None: all. ends: ids that end the text when they are sampled.
    may_end, must_end: whether the text may end before another token, and whether it must.
    is_named: special tokens are in `words` only where the filter names them, never as text.
    """

    words: torch.Tensor | None
    ends: frozenset[int] = frozenset()
    may_end: bool = False
    must_end: bool = False
    is_named: bool = False


class Constraint(Protocol):
    """State of one text. After a token that was not allowed, roll back before the next one."""

    def allowed(self) -> Allowed: ...
    def accept(self, token: int) -> None: ...
    def rollback(self, count: int) -> None: ...


class Combined:
    """One text under several filters: all must allow a token; any of them may end the text.

    Stops of the request count as EOS: filters that know nothing of them allow them where the text
    may end, and there only.
    """

    def __init__(
        self,
        filters: Sequence[Filter],
        tokenizer: Tokenizer,
        width: int,
        *,
        prefix: str = "",
        prefer_end: bool = False,
        stops: Iterable[int | str] | None = None,
    ) -> None:
        """Start the filters, which all hold; `prefix`: see `Filter.start`, `stops`: see `follow`.

        prefer_end: end the text as soon as the filters do not forbid it.
        """
        self._filters, self._tokenizer, self._width = filters, tokenizer, width
        self.parts: list[Constraint] = [given.start(tokenizer, width, prefix) for given in filters]
        everything = words_of(torch.arange(width).numpy(), width)
        self._going_on = everything & ~words_of(tokenizer.eos_token_ids, width)
        self._ids, self._fed, self._prefer_end = list[int](), list[bool](), prefer_end
        self._is_healed = bool(prefix)
        self.follow(stops)

    def follow(self, stops: Iterable[int | str] | None) -> None:
        """Let these ids, and strings that are one token, end the text as EOS does; None: only EOS.

        A string of several tokens may still end the text anywhere.
        """
        tokenizer, width = self._tokenizer, self._width
        ids = {tokenizer.single_id(s) if isinstance(s, str) else s for s in stops or ()}
        self._stops = frozenset(i for i in ids if i is not None) - {*tokenizer.eos_token_ids}
        self._stop_words = words_of(self._stops, width)
        self._text_words = words_of(self._stops - tokenizer.special_ids, width)

    def allowed(self, only: Iterable[int] | None = None, blocked: Collection[int] = ()) -> Allowed:
        """Return the allowed tokens after the accepted ones, among `only` and without `blocked`.

        Raises `FilterDeadEnd` if there is none, and the text may not end.
        """
        parts = [self._with_stops(part.allowed()) for part in self.parts]
        masks = [part.words for part in parts if part.words is not None]
        may_end = all(part.may_end for part in parts)
        must_end = any(part.must_end for part in parts) or (self._prefer_end and bool(masks))
        masks += [] if only is None else [words_of(only, self._width)]
        masks += [all_but(frozenset(blocked), self._width)] if blocked else []
        words = reduce(torch.bitwise_and, masks) if masks else None
        going_on = self._going_on & ~self._stop_words if may_end else self._going_on
        if words is not None and not (words & going_on).any():
            must_end = True
            if not may_end:
                who = " and ".join(f"`{repr(given)[:60]}`" for given in self._filters)
                who += " and the bans" if blocked else ""
                who += " and the stops" if self._text_words.any() else ""
                text = self._tokenizer.decode(self._ids)[-60:]
                raise FilterDeadEnd(f"no token is left by {who} after {text!r}; change them")
        ends = frozenset[int]().union(*(part.ends for part in parts))
        return Allowed(words, ends, may_end, may_end and must_end)

    def _with_stops(self, part: Allowed) -> Allowed:
        """Return what a filter allows if stops are allowed where the text may end, and only there.

        A healed token belongs to the prompt, and ends nothing. What a grammar names stays.
        """
        if part.words is None or not self._stops or (self._is_healed and not self._ids):
            return part
        if part.may_end:
            return replace(part, words=part.words | self._stop_words, ends=part.ends | self._stops)
        barred = self._text_words if part.is_named else self._stop_words
        return replace(part, words=part.words & ~barred)

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
