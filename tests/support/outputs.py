"""Runs of `Output` on tokens that a test chooses."""

from collections.abc import Sequence
from typing import Any

from spelled import spelled

from exl2flow.core.requests.request import Request
from exl2flow.engine.generate.event import Event, Token
from exl2flow.engine.generate.output import Output
from exl2flow.engine.generate.prompt import Prompt

PROMPT = (1,)
MANY = 10_000


class Run:
    """Feeds tokens to an `Output`, and keeps what came of it."""

    def __init__(
        self, vocabulary: Sequence[bytes | str], prompt: Prompt | None = None, **asked: Any
    ):
        self.tokenizer, self.ids = spelled(["prompt", *vocabulary])
        self.most = asked.setdefault("max_new_tokens", MANY)
        request = Request(PROMPT, **asked)
        self.output = Output(
            request, self.tokenizer, prompt or Prompt((PROMPT,)), max_new_tokens=self.most
        )
        self.events: list[Event] = []

    def push(self, *pieces: bytes | str, **extras: Any) -> Event | None:
        for piece in pieces:
            key = piece.encode() if isinstance(piece, str) else piece
            event = self.output.push(Token(self.ids[key], **extras))
            if event is not None:
                self.events.append(event)
        return event

    @property
    def rewinds(self) -> list[int]:
        return [len(event.suppressed_ids) for event in self.events if event.suppressed_ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def shown_ids(self) -> list[int]:
        return [token_id for event in self.events for token_id in event.ids]

    @property
    def end(self) -> Event:
        (*others, last) = self.events
        assert last.reason == self.output.reason
        assert all(event.reason is None for event in others)
        return last


def run_of(*pieces: bytes | str, **asked: Any) -> Run:
    """Push pieces until the text ends."""
    run = Run(pieces, **asked)
    for piece in pieces:
        if run.output.reason is None:
            run.push(piece)
    return run
