"""A stand-in for `Generator` that says what a test wants, and tokenizers with marks of formats."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Event as Flag
from types import SimpleNamespace
from typing import Any

import tokenizers
from tiny import tiny_tokenizer

from exl2flow.core.requests.conversation import PromptFormat
from exl2flow.core.requests.request import Request
from exl2flow.engine.chat import Piece, all_formats
from exl2flow.engine.generate import Event, Statistics
from exl2flow.engine.generate.event import TextPiece as Held
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.model import Tokenizer

EOS = 1
# special tokens of all formats
EVERY = sorted(
    {
        token
        for row in all_formats().values()
        for token in (
            *row.marks,
            *row.stop_tokens,
            *row.stop_strings,
            *re.findall(r"<\|[\w]+\|>|<\w+>|\[\S+?\]", row.template),
        )
        if re.fullmatch(r"<\S+>|\[[A-Zg/]\S+\]", token) and token != "<think>"
    }
)


def tokenizer_with(marks: Iterable[str] = ()) -> Tokenizer:
    """Return the tiny tokenizer with further special tokens."""
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer())
    known = backend.get_vocab()
    backend.add_special_tokens([mark for mark in marks if mark not in known])
    return Tokenizer(backend, bos_token_id=0, eos_token_ids=[EOS], source=Path("tiny"))


class Fake:
    """Says ids that a function makes of the number of the request and the place in the answer.

    An answer ends at the function's EOS or where the context is full. requests: all that came.
    """

    def __init__(
        self, says: Callable[[int, int], int], *, context: int = 512, marks: Iterable[str] = ()
    ) -> None:
        self.tokenizer = tokenizer_with(marks)
        spec = SimpleNamespace(source_dir=Path("tiny"), vocab_size=self.tokenizer.vocab_size)
        self.model = SimpleNamespace(tokenizer=self.tokenizer, spec=spec)
        self.page_tokens = PAGE_TOKENS
        self.context, self.pages = context, -(-context // PAGE_TOKENS)
        self.requests: list[Request] = []
        self.prompts: list[list[int]] = []
        self._says = says

    def stream(self, request: Request, *, abort_event: Flag) -> Iterator[Event]:
        number, prompt = len(self.requests), list(request.prompts[0])
        assert len(prompt) < self.context
        assert isinstance(prompt[0], int)
        self.requests.append(request)
        self.prompts.append(prompt)
        made = 0
        for place in range(self.context - len(prompt)):
            if abort_event.is_set():
                yield self._last("cancelled", len(prompt), made)
                return
            token = self._says(number, place)
            if token in (request.stops or ()):
                held = Held(text="", ids=(token,))
                yield self._last("stop_token", len(prompt), made, held=held)
                return
            made += 1
            if place == self.context - len(prompt) - 1:
                break
            yield Event(stage="text", text=self._text(token, request), ids=(token,))
        yield self._last("max_new_tokens", len(prompt), made, ids=(token,), text="cut")

    def _text(self, token: int, request: Request) -> str:
        return self.tokenizer.decode([token], special=request.decode_special)

    def _last(self, reason: str, prompt: int, made: int, **fields: object) -> Event:
        counts = Statistics(
            prompt_tokens=prompt,
            cached_tokens=0,
            cached_pages=0,
            new_tokens=made,
            waiting_seconds=0.0,
            prompt_seconds=0.0,
            text_seconds=0.0,
        )
        return Event(stage="text", reason=reason, statistics=counts, **fields)


def saying(*texts: str) -> Callable[[Tokenizer], Callable[[int, int], int]]:
    """Return what makes a `Fake` say these texts, one per request, and end each with EOS."""

    def bound(tokenizer: Tokenizer) -> Callable[[int, int], int]:
        answers = [tokenizer.encode(text, special=True) for text in texts]
        return lambda number, place: [*answers[number % len(answers)], EOS][place]

    return bound


def scripted(*texts: str, context: int = 512, marks: Iterable[str] = ()) -> Fake:
    """Return a generator that says these texts, one per request."""
    fake = Fake(lambda number, place: EOS, context=context, marks=marks)
    fake._says = saying(*texts)(fake.tokenizer)
    return fake


def text_of(pieces: Iterable[Piece], kind: str = "answer") -> str:
    """Return the joined text of the pieces of a kind."""
    return "".join([piece.text for piece in pieces if piece.kind == kind])


def notes(pieces: Iterable[Piece]) -> str:
    """Return the joined notes."""
    return text_of(pieces, "note")


def own(template: str, **fields: Any) -> PromptFormat:
    """Return a format of a template."""
    return PromptFormat(name="own", template=template, file=Path("own"), **fields)
