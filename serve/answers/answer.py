"""A running answer: the events of its texts become parts, without any dialect's form."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from exl2flow.core.requests.conversation import Thinking
from exl2flow.core.requests.request import Request
from exl2flow.engine.chat import CallArguments, CallBegin, ToolFormat, ToolParser, ToolText
from exl2flow.engine.chat.tool_events import CallEnd, ToolEvent
from exl2flow.engine.generate import Event, Job
from exl2flow.engine.generate.event import summed
from exl2flow.model.text.thoughts import Splitter

WRITE_SECONDS = 0.02  # between two writes of a stream
PING_SECONDS = 10.0
LAST_SECONDS = 10.0  # in which the texts of an answer end that nobody reads any more
BROKEN = "a call of a function does not parse, so it stays text"


class Text(NamedTuple):
    """Text of an answer, or of the thoughts before it."""

    text: str
    is_thought: bool = False


Part = Text | CallBegin | CallArguments


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What a request becomes: a text per choice, and how the texts are read.

    prompts: ids; there are `n` choices of each. marks: of thoughts, which are separated. opened:
    the prompt has begun them. shows_calls: calls are shown before they have ended, for they are
    forced to be valid.
    """

    requests: tuple[Request, ...]
    prompts: tuple[tuple[int, ...], ...]
    n: int = 1
    marks: Thinking | None = None
    opened: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    tool_format: ToolFormat | None = None
    shows_calls: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def seed(self) -> int | None:
        """Of the first text; each text of the same prompt has the next one."""
        return self.requests[0].seed


@dataclass(frozen=True, slots=True)
class Update:
    """An event's addition to a choice."""

    index: int
    parts: list[Part]
    event: Event


class Choice:
    """Reads one text. calls: how many it has; is_broken: some of it begins like a call."""

    def __init__(self, plan: AnswerPlan) -> None:
        self.calls, self.is_broken, self.reasoning_tokens = 0, False, 0
        self._shows_calls, self._held = plan.shows_calls, list[Part]()
        self._splitter = None  # which drops white space, too
        if plan.marks is not None:
            self._splitter = Splitter(plan.marks, opened=plan.opened)
        self._parser = ToolParser(plan.tool_format, plan.tools) if plan.tool_format else None

    def parts(self, event: Event) -> list[Part]:
        """Return what an event adds."""
        parts, ends = list[Part](), event.reason is not None
        texts: Sequence[tuple[str, str]] = [("answer", event.text)] if event.text else []
        if self._splitter is not None:
            self.reasoning_tokens += len(event.ids) * (self._splitter.kind == "thinking")
            texts = self._splitter.push(event.text, ends=ends)
        for kind, text in texts:
            if kind == "thinking" or self._parser is None:
                parts.append(Text(text, kind == "thinking"))
            else:
                parts += self._read(self._parser.feed(text))
        if ends and self._parser is not None:
            parts += self._read(self._parser.finish())
        return parts

    def _read(self, events: Sequence[ToolEvent]) -> list[Part]:
        """Return parts of calls; what may turn out to be none is held to their ends."""
        parts = list[Part]()
        for event in events:
            match event:
                case ToolText(text=text, is_broken=is_broken):
                    self.is_broken |= is_broken
                    parts.append(Text(text))
                case CallEnd(is_valid=is_valid):
                    parts += self._held if is_valid else []
                    self.calls += is_valid
                    self._held.clear()
                case _:
                    (parts if self._shows_calls else self._held).append(event)
        return parts


class RunningAnswer:
    """The texts of one request while they are generated.

    began: when it came; waited: seconds in front of the generator; first: when a token came first.
    warnings: for the client, those of the plan among them.
    """

    def __init__(
        self,
        plan: AnswerPlan,
        jobs: Sequence[Job],
        events: asyncio.Queue[Event],
        *,
        began: float,
        waited: float,
        warnings: Sequence[str] = (),
    ) -> None:
        self.warnings = (*plan.warnings, *warnings)
        self.plan, self.began, self.waited, self.created = plan, began, waited, int(time.time())
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
        while len(self.ends) < len(self.choices):
            try:
                async with asyncio.timeout(PING_SECONDS):  # `wait_for` may swallow a cancellation
                    events = [await self._events.get()]
            except TimeoutError:
                yield []
                continue
            wait = written + WRITE_SECONDS - time.monotonic()
            if wait > 0 and events[0].reason is None:
                await asyncio.sleep(wait)
            while not self._events.empty():
                events.append(self._events.get_nowait())
            updates = list[Update]()
            for event in events:
                new = self._read(event)
                if event.error is None:
                    updates += new
                    continue
                if updates:
                    yield updates
                raise event.error
            if updates:  # what has no text, such as progress, delays none
                written = time.monotonic()
                yield updates

    def cancel(self) -> None:
        """End all texts, within a step."""
        for index, job in enumerate(self._jobs):
            if index not in self.ends:
                job.cancel()

    def let_go(self) -> None:
        """Forget the generator of texts that end there; their events are still read."""
        self._jobs = ()

    async def ended(self) -> None:
        """Wait until cancelled texts have ended, so that all of their tokens are counted."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                while len(self.ends) < len(self.choices):
                    event = await self._events.get()
                    if event.reason is not None and isinstance(event.tag, int):
                        self.ends[event.tag] = event

    def _read(self, event: Event) -> list[Update]:
        index = event.tag
        assert isinstance(index, int)
        if event.ids and self.first is None:
            self.first = time.monotonic()
        if event.reason is not None:
            self.ends[index] = event
        is_news = event.stage == "text" or event.scores is not None or event.reason is not None
        return [Update(index, self.choices[index].parts(event), event)] if is_news else []

    def usage(self) -> dict[str, Any]:
        """Return the counts of tokens; of prompts that choices share, once."""
        counts = [e.statistics for e in self.ends.values() if e.statistics is not None]
        prompt, new = sum(map(len, self.plan.prompts)), sum(c.new_tokens for c in counts)
        accepted = sum(c.accepted_tokens for c in counts)
        cached = sum(min(c.cached_tokens, c.prompt_tokens) for c in counts[:: self.plan.n])
        drafts = summed(c.drafts for c in counts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(c.drafted_tokens for c in counts) - accepted,
                "decode_steps": sum(c.steps for c in counts),
                **{f"{kind}_drafted_tokens": pair[0] for kind, pair in drafts.items()},
                **{f"{kind}_accepted_tokens": pair[1] for kind, pair in drafts.items()},
            },
        }
