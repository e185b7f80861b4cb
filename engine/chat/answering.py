"""Generate one answer, in one request or in several."""

import time
from collections.abc import Generator as Generated
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Event as Flag
from typing import Any, Literal

from exl2flow.core.requests.conversation import Answer
from exl2flow.core.requests.request import Filter, Request
from exl2flow.engine.chat.history import Reader
from exl2flow.engine.generate import Event, Generator
from exl2flow.engine.generate.event import summed
from exl2flow.model.text.thoughts import Splitter

End = Literal["complete", "limit", "overflow", "closed"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of an answer, of the thoughts before it, or a note for the user."""

    text: str
    kind: Literal["answer", "thinking", "note"] = "answer"


class Reply(Iterator[Piece]):
    """The pieces of an answer.

    abort_event: when it is set, from any thread, the answer ends where it is, as `close` ends it
    between two pieces.
    """

    def __init__(self, pieces: Generated[Piece], abort_event: Flag) -> None:
        """Take pieces that end when the flag is set."""
        self.abort_event, self._pieces = abort_event, pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """End the answer where it is."""
        self._pieces.close()


class _Either(Flag):
    """Is set when one of two flags is."""

    def __init__(self, first: Flag, second: Flag) -> None:
        super().__init__()
        self._flags = first, second

    def is_set(self) -> bool:
        return any(flag.is_set() for flag in self._flags)


@dataclass(slots=True, kw_only=True)
class ChatStatistics:
    """Tokens and times of the last answer; cached: context tokens that were not read again.

    steps, drafts: see `Statistics`.
    """

    context_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    first_token_seconds: float = 0.0
    tokens_per_second: float = 0.0
    steps: int = 0
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Resumed:
    """A filter of an answer whose first ids are from an earlier request."""

    given: Filter
    ids: tuple[int, ...]

    def start(self, tokenizer: Any, width: int, prefix: str = "") -> Any:
        """See `Filter.start`."""
        state = self.given.start(tokenizer, width, prefix)
        for token in self.ids:
            state.accept(token)
        return state


class Answering:
    """Appends generated tokens to an answer; `count`: the tokens so far."""

    def __init__(
        self,
        generator: Generator,
        reader: Reader,
        answer: Answer,
        statistics: ChatStatistics,
        *,
        max_tokens: int,
        abort_event: Flag,
    ) -> None:
        """Begin or continue an answer of up to `max_tokens` tokens; setting the flag ends it."""
        self.count, self._abort_event = 0, abort_event
        self._generator, self._reader, self._answer = generator, reader, answer
        self._max_tokens = max_tokens
        self._raw = reader.text_of(answer.ids)
        self._statistics, self._is_first = statistics, True
        self._begin = time.monotonic()
        self._first = self._begin
        self._cut = 0  # tokens of bans: their draws count once something follows them

    def stream(self, request: Request, *, opened: bool) -> Generated[Piece, None, End]:
        """Yield the pieces of a request, and return how it ended.

        Ids are taken as the generator shows them, so a text that goes on later has neither half a
        character nor the beginning of a stop string. `opened`: the prompt has begun the thoughts.

        Raises:
            Exception: what the generator raises; the answer has what came before.
        """
        ended, taken = Flag(), 0
        abort = _Either(ended, self._abort_event)
        end: End = "closed"
        if self._is_first:
            self._splitter = Splitter(self._reader.format.thinking, opened=opened)
            self._splitter.push(self._raw)
            self._statistics.context_tokens = len(request.prompts[0])
        events = self._generator.stream(request, abort_event=abort)
        try:
            for event in events:
                self._count(event)
                if abort.is_set() or event.error is not None:
                    continue
                if event.reason == "max_new_tokens":
                    end = "overflow"
                    if taken:  # its text may be cut within a character: it is generated again
                        continue
                elif event.reason not in (None, "cancelled"):
                    end = "complete"
                shown = self._shown(event)
                if self.count and self.count + len(shown) > self._max_tokens:
                    end = "limit"
                    ended.set()
                    continue
                taken += len(shown)
                self._take(event, shown)
                pieces = self._splitter.push(event.text, ends=end == "complete")
                for kind, text in pieces:
                    self._answer.text += text if kind == "answer" else ""
                    self._answer.thinking += text if kind == "thinking" else ""
                if self.count >= self._max_tokens and event.reason is None:
                    end = "limit"
                    ended.set()
                for kind, text in pieces:
                    yield Piece(text, kind)
        finally:
            ended.set()
            for event in events:
                self._count(event)
            self._is_first = False
            self._answer.ended = end == "complete"
            self._reader.complete(self._answer, opened=opened)
        return end

    def _shown(self, event: Event) -> tuple[int, ...]:
        """Return the ids of an event that are part of the answer."""
        if event.held is None:
            return event.ids
        hidden = len(event.held.ids) - (event.reason == "stop_token")
        return event.ids[: len(event.ids) - hidden]

    def _take(self, event: Event, shown: tuple[int, ...]) -> None:
        answer = self._answer
        self._cut += len(event.suppressed_ids)
        self.count += len(shown)
        self._raw += event.text
        answer.ids += shown
        if shown:
            answer.drawn += len(shown) + self._cut
            self._cut = 0
        if len(shown) < len(event.ids):  # a stop string began within a token
            known, raw = self._reader.text_of(answer.ids).lstrip(), self._raw.lstrip()
            answer.ids += self._reader.ids_of(raw[len(known) :]) if raw.startswith(known) else []

    def _count(self, event: Event) -> None:
        statistics, now = self._statistics, time.monotonic()
        if event.ids and not statistics.answer_tokens:
            self._first = now
            statistics.first_token_seconds = now - self._begin
        if event.ids:
            statistics.answer_tokens = self.count + len(event.ids)
        if event.statistics is None:
            return
        if self._is_first:
            statistics.cached_tokens = event.statistics.cached_tokens
        statistics.answer_tokens = self.count
        statistics.steps += event.statistics.steps
        statistics.drafts = summed([statistics.drafts, event.statistics.drafts])
        if self.count > 1 and now > self._first:
            statistics.tokens_per_second = (self.count - 1) / (now - self._first)
