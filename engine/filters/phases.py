"""Filter a text by phases: free thoughts up to a budget of tokens, then another filter."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.conversation import Thinking
from exl2flow.core.requests.request import Filter, check_integer
from exl2flow.engine.filters.constraint import Allowed, Constraint
from exl2flow.engine.sampling.bits import WORD, all_but, words_of
from exl2flow.model import Tokenizer
from exl2flow.model.text.spelling import spelling_of


@dataclass(frozen=True)
class Phases:
    """Texts that think between marks, and of which the rest is what another filter allows.

    opened: the prompt has begun the thoughts; otherwise the text may begin with their mark, or be
        an answer from its first token on.
    budget: tokens of thoughts, after which `message` and the closing mark follow, come what may;
        0: thoughts are closed where they begin; None: no limit.
    then: what the answer must match; None: anything. With it, the text ends in the answer only.

    A healed token comes before all phases. Raises `ConfigError` if a value is out of range.
    """

    marks: Thinking
    opened: bool = False
    budget: int | None = None
    message: str = ""
    then: Filter | None = None

    def __post_init__(self) -> None:
        if not self.marks.open or not self.marks.close:
            raise ConfigError(f"`marks` is {self.marks}; thoughts need a mark before and behind")
        if self.budget is not None:
            check_integer("budget", self.budget)
            if self.budget < 0:
                raise ConfigError(f"`budget` is {self.budget}; it must be 0 or more")
        if self.marks.close in self.message:
            raise ConfigError(f"`message` contains {self.marks.close!r}, which is put behind it")

    def start(self, tokenizer: Tokenizer, width: int, prefix: str = "") -> "_PhasesState":
        """See `Filter.start`; raises `ConfigError` if the tokens cannot spell the closing mark."""
        return _PhasesState(self, tokenizer, width, skipped=1 if prefix else 0)


class _Place(NamedTuple):
    """Where a text stands after a token.

    held: bytes that may become a mark. done: tokens of the thoughts, or of what closes them.
    begin: the first id that the inner filter reads; None: what came cannot be an answer.
    """

    phase: Literal["start", "thinking", "closing", "answer"]
    held: bytes = b""
    done: int = 0
    begin: int | None = None


class _PhasesState:
    """State of one text; the inner filter has read the ids from `_begin` up to `_end`."""

    def __init__(self, given: Phases, tokenizer: Tokenizer, width: int, *, skipped: int) -> None:
        marks = given.marks
        self._width, self._skipped, self._budget = width, skipped, given.budget
        self._spelling, self._special = spelling_of(tokenizer), _special(tokenizer)
        self._open, self._close = marks.open.encode(), marks.close.encode()
        self._direct = marks.answer.encode()
        self._closing_ids = tokenizer.encode(marks.close, special=True)
        self._forced = tokenizer.encode(given.message) + self._closing_ids
        if self._close not in b"".join(map(self._bytes, self._closing_ids)):
            raise ConfigError(f"the tokens of `{tokenizer.source}` cannot spell {marks.close!r}")
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._beyond = lru_cache(64)(self._find_beyond)
        self._inner: Constraint | None = None
        if given.then is not None:
            self._inner = given.then.start(tokenizer, width)
        self._begin = self._end = skipped
        self._ids = list[int]()
        first = self._thoughts(b"", 0) if given.opened else _Place("start", begin=skipped)
        self._places = [first]

    @property
    def answer(self) -> object:
        """The state of the inner filter, once the answer has begun."""
        place = self._places[-1]
        return self._inner_at(place) or self if place.phase == "answer" else self

    def allowed(self) -> Allowed:
        place = self._places[-1]
        if len(self._ids) < self._skipped:
            return Allowed(None)
        if place.phase == "closing":
            return Allowed(words_of([self._forced[place.done]], self._width), is_named=True)
        if self._inner is None:
            return Allowed(None, may_end=True)
        if place.phase == "thinking":
            return Allowed(all_but(self._eos.union(self._overshoots(place.held)), self._width))
        inner = self._inner_at(place)
        if place.phase == "answer":
            assert inner is not None
            return inner.allowed()
        marks = words_of(self._marks_after(place.held), self._width)
        if inner is None:
            return Allowed(marks, is_named=True)
        part = inner.allowed()
        words = None if part.words is None else part.words | marks
        return Allowed(words, part.ends, part.may_end, is_named=part.is_named)

    def accept(self, token: int) -> None:
        place = self._places[-1]
        if len(self._ids) >= self._skipped:
            may = place.phase != "start" or self._may_answer(place, token)
            self._ids.append(token)
            self._places.append(self._after(place, token, may=may))
        else:
            self._ids.append(token)
            self._places.append(place)

    def rollback(self, count: int) -> None:
        length = len(self._ids) - count
        if self._inner is not None and self._end > length:
            self._inner.rollback(self._end - max(length, self._begin))
            self._end = max(length, self._begin)
        del self._ids[length:], self._places[length + 1 :]

    def _after(self, place: _Place, token: int, *, may: bool) -> _Place:
        """Return the place after a token, the last of the ids; `may`: an answer may begin so."""
        text, behind = place.held + self._bytes(token), len(self._ids)
        if place.phase == "thinking":
            return self._thought(text, place.done + 1)
        if place.phase == "closing":
            count = place.done + (token == self._forced[place.done])
            is_closed = count == len(self._forced)
            return _Place("answer", begin=behind) if is_closed else _Place("closing", done=count)
        if place.phase == "answer":
            return place
        text = text.lstrip()
        if text.startswith(self._open):
            return self._thought(text[len(self._open) :], 0)
        if self._direct and text.startswith(self._direct):
            return _Place("answer", begin=behind)
        if any(mark.startswith(text) for mark in (self._open, self._direct)):
            return _Place("start", text, begin=place.begin if may else None)
        return _Place("answer", begin=self._skipped)

    def _thought(self, text: bytes, count: int) -> _Place:
        """Return the place after `count` tokens of thoughts, of which `text` is the end."""
        if self._close in text:
            return _Place("answer", begin=len(self._ids))
        longest = len(self._close) - 1
        return self._thoughts(text[len(text) - longest :] if len(text) > longest else text, count)

    def _thoughts(self, held: bytes, count: int) -> _Place:
        """Return the place within thoughts, closing them at the budget, or their mark begun."""
        if self._budget is None or count < self._budget:
            return _Place("thinking", held, count)
        ids = self._closing_ids
        longest = min(count, len(ids) - 1)
        begun = (n for n in range(longest, 0, -1) if self._ids[-n:] == ids[:n])
        if (done := next(begun, 0)) > 0:
            done += len(self._forced) - len(ids)
        return _Place("closing", done=done)

    def _may_answer(self, place: _Place, token: int) -> bool:
        """Return whether the inner filter allows a token at the beginning of the text."""
        if self._inner is None:
            return True
        if (inner := self._inner_at(place)) is None:
            return False
        words = inner.allowed().words
        return words is None or bool(words[token // WORD] >> token % WORD & 1)

    def _inner_at(self, place: _Place) -> Constraint | None:
        """Return the inner filter after it has read all that belongs to the answer."""
        if self._inner is None or place.begin is None:
            return None
        if place.begin != self._begin:
            self._inner.rollback(self._end - self._begin)
            self._begin = self._end = place.begin
        for token in self._ids[self._end :]:
            self._inner.accept(token)
        self._end = len(self._ids)
        return self._inner

    def _marks_after(self, held: bytes) -> set[int]:
        """Return the ids that go on with a mark that may come first."""
        ids = set[int]()
        for mark in (self._open, self._direct):
            if mark.startswith(held) and (rest := mark[len(held) :]):
                found = {*self._spelling_of(rest)}
                if mark is self._direct:
                    found -= self._beyond(rest)
                ids |= found
        return ids

    def _overshoots(self, held: bytes) -> set[int]:
        """Return the ids that close the thoughts and begin the answer within the same token."""
        ids, longest = set[int](), min(len(self._close) - 1, len(held))
        for count in range(longest + 1):
            if self._close.startswith(held[len(held) - count :]):
                ids |= self._beyond(self._close[count:])
        return ids

    def _spelling_of(self, rest: bytes) -> Iterator[int]:
        """Yield the ids whose bytes begin a text, or begin with it."""
        for _, tokens in self._spelling.tokens(rest, overshoots=True):
            yield from tokens
        for token, name in self._special.items():
            if name and (rest.startswith(name) or name.startswith(rest)):
                yield token

    def _find_beyond(self, rest: bytes) -> frozenset[int]:
        """Return the ids that begin with a text and go on with more than white space."""
        found = self._spelling_of(rest)
        return frozenset(i for i in found if self._bytes(i)[len(rest) :].strip())

    def _bytes(self, token: int) -> bytes:
        if (name := self._special.get(token)) is not None:
            return name
        return self._spelling.of[token] if token < len(self._spelling.of) else b""


@lru_cache(4)
def _special(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the names of special tokens."""
    names = ((i, tokenizer.backend.id_to_token(i) or "") for i in sorted(tokenizer.special_ids))
    return {token: name.encode() for token, name in names}


KEPT = (_special,)  # by tokenizer
