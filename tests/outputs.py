"""Runs of `Output` on tokens that a test chooses."""

from collections.abc import Sequence
from typing import Any

from spelled import spelled

from exl2flow.inference.generate.event import Event, Token
from exl2flow.inference.generate.output import Outcome, Output
from exl2flow.inference.generate.prompt import Prompt
from exl2flow.inference.generate.request import Request

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
        self.rewinds: list[int] = []

    def push(self, *pieces: bytes | str, **extras: Any) -> Outcome:
        for piece in pieces:
            key = piece.encode() if isinstance(piece, str) else piece
            outcome = self.output.push(Token(self.ids[key], **extras))
            self.keep(outcome)
        return outcome

    def keep(self, outcome: Outcome) -> None:
        if outcome.event is not None:
            self.events.append(outcome.event)
        if outcome.rewind:
            self.rewinds.append(outcome.rewind)

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
