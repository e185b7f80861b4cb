"""Text of tokens that arrive one at a time."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from exl2flow.model.text.pieces import REPLACEMENT
from exl2flow.model.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 8  # of the prompt; enough for a decoder that looks back one token
MOST_HELD = 4  # U+FFFD; an incomplete character has at most 3


class StreamPosition(NamedTuple):
    """A state that a `TextStream` can return to."""

    tokens: int
    anchor: int
    shown: int

    @property
    def is_holding(self) -> bool:
        """Whether tokens wait for the rest of their last character."""
        return self.shown < self.tokens


class TextStream:
    """Yields text as soon as its characters are complete."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, special: bool = False
    ) -> None:
        """Start after a prompt's token ids; `special`: spell out special tokens."""
        self._tokenizer = tokenizer
        self._special = special
        self._without_text = frozenset() if special else tokenizer.special_ids
        known = (token_id for token_id in reversed(prompt) if token_id < tokenizer.vocab_size)
        seen = (token_id for token_id in known if token_id not in self._without_text)
        self._ids = list(islice(seen, CONTEXT_TOKENS))[::-1]
        # an incomplete character at the start would make all bytes behind it undecodable
        while self._ids and self._text(0).startswith(REPLACEMENT):
            del self._ids[0]
        self._anchor = 0  # decoding begins here: a token's spacing depends on the one before
        self._shown = len(self._ids)

    @property
    def place(self) -> StreamPosition:
        """The current state, for `rewind`."""
        return StreamPosition(len(self._ids), self._anchor, self._shown)

    def rewind(self, place: StreamPosition) -> None:
        """Forget all tokens pushed since `place` was taken."""
        del self._ids[place.tokens :]
        _, self._anchor, self._shown = place

    def push(self, token_id: int) -> str:
        """Take a token and return the text that it completes, possibly empty."""
        if token_id in self._without_text:
            return ""
        self._ids.append(token_id)
        text = self._pending()
        if text.endswith(REPLACEMENT) and self._text(self._shown).count(REPLACEMENT) <= MOST_HELD:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """Return what was held back as an incomplete character."""
        return self._show(self._pending())

    def _pending(self) -> str:
        shown = self._text(self._anchor, self._shown)
        return self._text(self._anchor)[len(shown) :]

    def _text(self, begin: int, end: int | None = None) -> str:
        return self._tokenizer.decode(self._ids[begin:end], special=self._special)

    def _show(self, text: str) -> str:
        self._anchor, self._shown = self._shown, len(self._ids)
        return text
