"""A running answer: the events of its texts become parts, without any dialect's form."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from exl2flow.core.requests.conversation import Thinking
from exl2flow.core.requests.request import Request
from exl2flow.inference.chat import (
    CallArguments,
    CallBegin,
    CallEnd,
    ToolFormat,
    ToolParser,
    ToolText,
)
from exl2flow.inference.generate import Event, Job
from exl2flow.model.text.thoughts import Splitter

WRITE_SECONDS = 0.02  # between two writes of a stream
PING_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Said:
    """Text of an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the thoughts before an answer."""

    text: str


Part = Said | Thought | CallBegin | CallArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """What a request becomes: a text per choice, and how the texts are read.

    marks: of thoughts, which are separated. opened: the prompt has begun them. is_forced: calls are
    valid, so they are shown as they come. prompts: ids, by prompt; there are `n` choices of each.
    """

    requests: tuple[Request, ...]
    prompts: tuple[tuple[int, ...], ...]
    n: int = 1
    seed: int = 0
    marks: Thinking | None = None
    opened: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    tool_format: ToolFormat | None = None
    is_forced: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class Update:
    """What is new of a choice; `end`: its last event."""

    index: int
    parts: list[Part]
    event: Event

    @property
    def end(self) -> Event | None:
        """The event, if it is the last one."""
        return self.event if self.event.reason is not None else None


class Choice:
    """Reads one text. calls: how many it has; is_broken: some of it begins like a call."""

    def __init__(self, plan: AnswerPlan) -> None:
        self.calls, self.is_broken, self.reasoning_tokens = 0, False, 0
        self._is_forced, self._drops = plan.is_forced, False
        self._held = list[Part]()
        self._splitter = None  # which drops white space, too
        if plan.marks is not None:
            self._splitter = Splitter(plan.marks, opened=plan.opened)
        self._parser = ToolParser(plan.tool_format, plan.tools) if plan.tool_format else None

    def parts(self, event: Event) -> list[Part]:
        """Return what an event adds."""
        parts = list[Part]()
        ends = event.reason is not None
        for kind, text in self._split(event, ends=ends):
            if kind == "thinking":
                parts.append(Thought(text))
            elif self._parser is None:
                parts.append(Said(text))
            else:
                parts += self._read(self._parser.feed(text))
        if ends and self._parser is not None:
            parts += self._read(self._parser.finish())
        return parts

    def _split(self, event: Event, *, ends: bool) -> Sequence[tuple[str, str]]:
        if self._splitter is None:
            return [("answer", event.text)] if event.text else []
        if self._splitter.kind == "thinking":
            self.reasoning_tokens += len(event.ids)
        return self._splitter.push(event.text, ends=ends)

    def _read(self, events: Sequence[Any]) -> list[Part]:
        """Return parts of calls; those that may turn out to be none are held to their ends."""
        parts = list[Part]()
        for event in events:
            match event:
                case ToolText(text=text, is_broken=is_broken):
                    self.is_broken |= is_broken
                    if not (is_broken and self._drops):
                        parts.append(Said(text))
                    self._drops = False
                case CallEnd(is_valid=is_valid):
                    parts += self._held if is_valid else []
                    if not self._is_forced:
                        self.calls += is_valid
                    self._drops = self._is_forced and not is_valid
                    self._held.clear()
                case CallBegin() | CallArguments() if self._is_forced:
                    self.calls += isinstance(event, CallBegin)
                    parts.append(event)
                case _:
                    self._held.append(event)
        return parts


class RunningAnswer:
    """The texts of one request while they are generated.

    request_id, key, model, path: for the log.
    """

    def __init__(self, plan: AnswerPlan, jobs: Sequence[Job], events: asyncio.Queue[Event]) -> None:
        self.plan, self.began = plan, time.monotonic()
        self.created = int(time.time())
        self.first: float | None = None
        self.choices = [Choice(plan) for _ in plan.requests]
        self.ends: dict[int, Event] = {}
        self._jobs, self._events = jobs, events

    async def updates(self) -> AsyncIterator[list[Update]]:
        """Yield what is new, at most every 20 ms; an empty list where nothing came for 10 s.

        Raises:
            Exception: what ended a text.
        """
        written = 0.0
        try:
            while len(self.ends) < len(self.choices):
                try:
                    first = await asyncio.wait_for(self._events.get(), PING_SECONDS)
                except TimeoutError:
                    yield []
                    continue
                wait = written + WRITE_SECONDS - time.monotonic()
                if wait > 0 and first.reason is None:
                    await asyncio.sleep(wait)
                written = time.monotonic()
                events = [first]
                while not self._events.empty():
                    events.append(self._events.get_nowait())
                if updates := [u for e in events if (u := self._update(e)) is not None]:
                    yield updates
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End all texts, within a step."""
        for index, job in enumerate(self._jobs):
            if index not in self.ends:
                job.cancel()

    def _update(self, event: Event) -> Update | None:
        index = event.tag
        assert isinstance(index, int)
        if event.ids and self.first is None:
            self.first = time.monotonic()
        if event.reason is not None:
            self.ends[index] = event
        if event.error is not None:
            raise event.error
        if event.stage != "text" and event.scores is None and event.reason is None:
            return None
        return Update(index, self.choices[index].parts(event), event)

    def usage(self) -> dict[str, Any]:
        """Return the counts of tokens; of prompts that choices share, once."""
        counts = [e.statistics for e in self.ends.values() if e.statistics is not None]
        prompt = sum(map(len, self.plan.prompts))
        new = sum(c.new_tokens for c in counts)
        drafted, accepted = (
            sum(getattr(c, name) for c in counts) for name in ("drafted_tokens", "accepted_tokens")
        )
        cached = sum(min(c.cached_tokens, c.prompt_tokens) for c in counts[:: self.plan.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(c.reasoning_tokens for c in self.choices),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }
