"""Filters by strings: texts that begin with one of them, and texts that are one of them."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from exl2flow.core.errors import ConfigError
from exl2flow.engine.filters.constraint import Allowed
from exl2flow.engine.sampling.bits import words_of
from exl2flow.model import Tokenizer
from exl2flow.model.text.spelling import folded, spelling_of


@dataclass(frozen=True)
class _Strings:
    strings: Sequence[str]
    case_insensitive: bool = False

    def __post_init__(self) -> None:
        strings = (self.strings,) if isinstance(self.strings, str) else tuple(self.strings)
        object.__setattr__(self, "strings", strings)
        valid = [isinstance(s, str) and s == s.encode(errors="ignore").decode() for s in strings]
        if not strings or "" in strings or not all(valid):
            raise ConfigError(
                f"`{type(self).__name__}` got {strings!r}; it takes non-empty strings"
            )

    def start(self, tokenizer: Tokenizer, width: int, prefix: str = "") -> "_ChoiceState":
        """See `Filter.start`; raises `ConfigError` if the tokens can spell none of the strings."""
        text = copy(_texts(self, tokenizer, width, prefix))
        text.states = [b""]
        return text


class PrefixFilter(_Strings):
    """Texts that begin with one of the strings; the token that completes it may add more."""

    def __init__(self, *strings: str) -> None:
        """Take non-empty strings; anything else is a `ConfigError`."""
        super().__init__(strings)


class SelectFilter(_Strings):
    """Texts that are one of the strings; `case_insensitive`: in upper, lower or mixed case.

    The token that completes a string ends the text. Where longer strings continue it, the model
    chooses between these and an EOS id, if there is one.
    """


class _ChoiceState:
    """State of one text; `states`: its bytes after each token.

    places: of each string, from which tokens complete it. continued: strings that others begin
    with, if an id can end the text.
    """

    def __init__(self, given: _Strings, tokenizer: Tokenizer, width: int, prefix: str) -> None:
        folds, self._opens = given.case_insensitive, isinstance(given, PrefixFilter)
        self._spelling, self._width = spelling_of(tokenizer, folds=folds), width
        self._eos, self.states = tokenizer.eos_token_ids, [b""]
        keys = [(prefix + string).encode() for string in given.strings]
        keys = sorted({folded(key) if folds else key for key in keys})
        places = {key: self._spelling.places(key, overshoots=self._opens) for key in keys}
        self._places = {key: of_key for key, of_key in places.items() if 0 in of_key}
        if not self._places:
            raise ConfigError(f"the tokens of `{tokenizer.source}` cannot spell those of {given}")
        pairs = pairwise(self._places) if self._eos else ()
        self._continued = {one for one, other in pairs if other.startswith(one)}
        self._after = lru_cache(64)(self._find)  # 19 KB each for a vocabulary of 152k

    def allowed(self) -> Allowed:
        return self._after(self.states[-1])

    def accept(self, token: int) -> None:
        text, added = self.states[-1], self._spelling.of[token] or b"\xff"  # in no string
        is_free = self._opens and text.startswith(tuple(self._places))
        self.states.append(text if is_free else text + added)

    def rollback(self, count: int) -> None:
        del self.states[len(self.states) - count :]

    def _find(self, text: bytes) -> Allowed:
        if self._opens and text.startswith(tuple(self._places)):
            return Allowed(None, may_end=True)
        may_end = text in self._places
        ids, ends = set[int](), set(self._eos if may_end else ())
        for key, places in self._places.items():
            rest = key[len(text) :] if key.startswith(text) else b""
            for count, tokens in self._spelling.tokens(rest, overshoots=self._opens):
                if len(text) + count in places:
                    ids.update(tokens)
                if count == len(rest) and not self._opens and key not in self._continued:
                    ends.update(tokens)
        must_end = may_end and text not in self._continued
        return Allowed(words_of(ids | ends, self._width), frozenset(ends), may_end, must_end)


_texts = lru_cache(32)(_ChoiceState)
KEPT = (_texts,)  # by tokenizer
