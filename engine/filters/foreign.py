"""Filters written for exllamav2."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.engine.filters.constraint import Allowed
from exl2flow.engine.sampling.bits import words_of
from exl2flow.model import Tokenizer

_READERS = WeakValueDictionary[
    int, "_ForeignState"
]()  # by the id of a filter object: whose text it read


@dataclass(frozen=True)
class ForeignFilter:
    """An object with `begin`, `feed` and `next`, or a function that makes one for each text.

    A healed token is not shown to it. After another text used it, or tokens were taken back, it
    reads a text again, unless the caller feeds it (`is_fed`). `clone` may return half: not called.
    """

    source: Any
    is_fed: bool = False

    def start(self, tokenizer: Tokenizer, width: int, prefix: str = "") -> "_ForeignState":
        is_made = hasattr(self.source, "begin") and not isinstance(self.source, type)
        inner = self.source if is_made else self.source()
        if not all(hasattr(inner, name) for name in ("begin", "feed", "next")):
            raise ConfigError(f"the filter {inner!r} lacks `begin`, `feed` or `next`")
        text = _ForeignState(inner, tokenizer, width, skipped=1 if prefix else 0)
        _READERS.update({id(inner): text} if self.is_fed else {})
        return text


class _ForeignState:
    def __init__(self, inner: Any, tokenizer: Tokenizer, width: int, *, skipped: int) -> None:
        self._inner, self._width, self._skipped = inner, width, skipped
        self._known, self._eos = tokenizer.vocab_size, tokenizer.eos_token_ids
        self._ids, self._masks = list[int](), getattr(inner, "can_mask_logits", bool)()

    def allowed(self) -> Allowed:
        if len(self._ids) < self._skipped:
            return Allowed(None)
        if _READERS.get(id(self._inner)) is not self:
            self._inner.begin("")
            for token in self._ids[self._skipped :]:
                self._inner.feed(torch.tensor([[token]]))
            _READERS[id(self._inner)] = self
        if self._masks:
            with suppress(RuntimeError):  # formatron pins memory, which needs a CUDA device
                self._inner.prepare_logit_mask()
                logits = self._inner.mask_logits(torch.zeros(self._width)).flatten()[: self._known]
                return self._of((logits > -torch.inf).nonzero().flatten().numpy(), ())
        self._masks = False
        return self._of(*self._inner.next())

    def accept(self, token: int) -> None:
        self._ids.append(token)
        if _READERS.get(id(self._inner)) is self:
            self._inner.feed(torch.tensor([[token]]))

    def rollback(self, count: int) -> None:
        del self._ids[len(self._ids) - count :]
        if count and _READERS.get(id(self._inner)) is self:
            del _READERS[id(self._inner)]

    def _of(self, ids: Any, ends: Any) -> Allowed:
        ends = frozenset(map(int, ends))
        if ids is None:
            return Allowed(None, ends, may_end=True)
        words = words_of(ids, self._width)
        stops = [t for t in self._eos if t < self._width and words[t >> 5] >> (t & 31) & 1]
        return Allowed(words, ends.union(stops), may_end=bool(stops))
