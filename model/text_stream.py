"""Text of tokens that arrive one at a time."""

from collections.abc import Sequence

from exl2flow.model.tokenizer import Tokenizer

CONTEXT_TOKENS = 8  # of the prompt; enough for a decoder that looks back one token
REPLACEMENT = "\ufffd"  # how an incomplete UTF-8 character decodes


class TextStream:
    """Yields text as soon as its characters are complete."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """Begin after the token ids of a prompt."""
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._anchor = 0  # decoding begins here: a token's spacing depends on the one before
        self._shown = len(self._ids)

    def push(self, token_id: int) -> str:
        """Take a token and return the text that it completes, possibly empty."""
        self._ids.append(token_id)
        text = self._pending()
        return "" if text.endswith(REPLACEMENT) else self._show(text)

    def flush(self) -> str:
        """Return what was held back as an incomplete character."""
        return self._show(self._pending())

    def _pending(self) -> str:
        shown = self._tokenizer.decode(self._ids[self._anchor : self._shown])
        return self._tokenizer.decode(self._ids[self._anchor :])[len(shown) :]

    def _show(self, text: str) -> str:
        self._anchor, self._shown = self._shown, len(self._ids)
        return text
