"""A loaded model as a server needs it: its generator, formats and adapters, and what it admits."""

import asyncio
import ctypes
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from traceback import format_exception
from typing import Any, Literal, TypeVar

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.serving import ServeOptions
from exl2flow.core.requests.conversation import PromptFormat
from exl2flow.core.runtime.collection import only_new_are_collected
from exl2flow.core.runtime.turns import Turns
from exl2flow.engine import Adapter, AsyncGenerator, Event, Generator, LoadedModel
from exl2flow.engine.chat import named_tool_format, tool_format
from exl2flow.engine.chat.history import Reader
from exl2flow.engine.filters import GrammarFilter, forget
from exl2flow.engine.filters.trial import Trial
from exl2flow.serve.answers.answer import AnswerPlan, RunningAnswer
from exl2flow.serve.answers.bounds import MOST_IDS
from exl2flow.serve.answers.fields import Lora
from exl2flow.serve.answers.logprobs import Names
from exl2flow.serve.errors import ApiError, shown
from exl2flow.serve.hosts.fair_queue import AHEAD, Admission, FairQueue
from exl2flow.serve.hosts.keys import Key

log = logging.getLogger("exl2flow.serve")
PREPARING = 4  # requests that are rendered, encoded and compiled at once
PAUSE = 0.01  # seconds between two looks at running texts; a stream writes each 20 ms
SCALED = 16  # adapters with a scale of a request that are kept
SOUND_SECONDS = 3600.0  # a generator that fails sooner after the last failure is not made anew
ANYONE = Key("-", waiting=None)
NAMES = ("User", "Assistant")  # in format `raw`
NO_TOOLS = "the template shows no tools; they go into the system prompt"
State = Literal["ready", "draining", "recovering", "failed"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CacheUse:
    """free_pages: that no text uses. preemptions: how often texts had to wait for others' pages.

    tier_bytes: of pages in host memory (ram) and on disk.
    """

    free_pages: int = 0
    preemptions: int = 0
    tier_bytes: dict[str, int] = field(default_factory=lambda: {"ram": 0, "disk": 0})


class _Running:
    """A generator, and the thread that runs it from the first text on."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    @cached_property
    def thread(self) -> AsyncGenerator:
        return AsyncGenerator(self.generator, pause=PAUSE)


class ModelHost:
    """One model. state: whether it takes requests. warnings: about the model, for its clients.

    room: most tokens of one text, prompt included. has_grammars: whether calls of functions are
    forced. reader: writes conversations; None: the model has no prompt format. defaults: of the
    sampler. adapters: by name; default_adapters: names of those of requests that name none.
    load_seconds: what loading has taken.
    """

    def __init__(
        self,
        model: LoadedModel,
        make: Callable[[], Generator],
        options: ServeOptions,
        *,
        fmt: PromptFormat | None,
        defaults: dict[str, Any],
        adapters: tuple[Adapter, ...] = (),
        name: str | None = None,
    ) -> None:
        """Make the generator; `make` is called again after a failure.

        name: for clients, without it that of the folder.
        """
        self.model, self.options, self.defaults = model, options, defaults
        self.adapters = {one.folder.name: one for one in adapters}
        self.default_adapters = [*self.adapters]
        self.name, self.created = name or model.spec.source_dir.resolve().name, int(time.time())
        self.tokenizer, self.width = model.tokenizer, model.spec.vocab_size
        self.load_seconds, self.tokens = 0.0, Names(model.tokenizer)
        generator = make()
        self._make, self._failed_at = make, -math.inf
        self._running: _Running | None = _Running(generator)  # None: it failed, or was closed
        self._recovery: asyncio.Task[None] | None = None
        self.pages = generator.pages
        self.room = min(generator.context, self.pages * generator.page_tokens)
        self.tokenizer.most = max(self.room, MOST_IDS)
        self.trial, self.warnings = Trial(self.tokenizer, self.width), list[str]()
        self._scaled = lru_cache(SCALED)(Adapter.scaled)  # adapters of equal content are equal
        self.reader = None
        if fmt is not None:
            self.reader = Reader(fmt, self.tokenizer, NAMES, now=datetime.now())
        if options.tool_format is not None:
            self.tool_format = named_tool_format(options.tool_format)
        else:
            template = "" if fmt is None else fmt.template
            self.tool_format = tool_format(template, self.tokenizer.backend.get_vocab())
        if self.reader is not None and self.tool_format.is_generic:
            self.warnings.append(NO_TOOLS)
        self.has_grammars, self._entering = False, 0
        self.state: State = "ready"
        self.answers = dict[RunningAnswer, Admission]()
        self._turns = Turns(PREPARING)
        self._queue = FairQueue(options.slots + AHEAD)
        self._pool = ThreadPoolExecutor(PREPARING, "exl2flow-serve")

    def start(self) -> None:
        """Warm the generator up; the first grammar holds other threads up, so it is now.

        Raises:
            InferenceError: the model does not run.
        """
        if self.generator is not None:
            self.generator.warmup()
        if self.options.tool_grammar == "on":
            try:
                GrammarFilter(regex="a").start(self.tokenizer, self.width)
                self.has_grammars = True
            except ConfigError as error:  # llguidance is missing, or cannot read the tokenizer
                self.warnings.append(f"no grammars: {shown(error)}")

    @property
    def names(self) -> list[str]:
        """The names of the model, alone and with each adapter."""
        return [self.name, *(f"{self.name}:{adapter}" for adapter in self.adapters)]

    @property
    def is_lost(self) -> bool:
        """Whether the model cannot run again: a process that shares it is gone."""
        return self.model.team is not None and self.model.team.failure is not None

    @property
    def generator(self) -> Generator | None:
        """The generator; None from a failure until there is a new one."""
        return None if self._running is None else self._running.generator

    @property
    def progress(self) -> int | None:
        """Steps of the generator so far, None while it has nothing to do or is made."""
        running = self._running
        return None if running is None or running.generator.is_idle else running.thread.steps

    @property
    def cache_use(self) -> CacheUse:
        """Figures of the cache; all is 0 from a failure until there is a new one."""
        made = self.generator
        if made is None:
            return CacheUse()
        return CacheUse(made.free_pages, made.preemptions, made.tier_bytes)

    @property
    def count(self) -> int:
        """Requests that are prepared, wait or run."""
        return len(self.answers) + self._entering

    def adapters_for(self, model: str, lora: Sequence[Lora] | None) -> tuple[Adapter, ...]:
        """Return the adapters of a request: those it names, that of a model's name, or defaults."""
        model = self.options.aliases.get(model, model)
        known, named = self.adapters, model.rpartition(":")[2]
        if lora is None:
            is_one = named in known and model != self.name
            return tuple(known[n] for n in ([named] if is_one else self.default_adapters))
        if unknown := [row.name for row in lora if row.name not in known]:
            there = ", ".join(f"`{name}`" for name in known) or "none"
            raise ConfigError(f"`lora` has {unknown[0]!r:.80}; there is {there}")
        rows = [(known[row.name], row.scale) for row in lora if row.scale]
        return tuple(one if scale == 1 else self._scaled(one, scale) for one, scale in rows)

    def load_adapter(self, name: str, folder: Path, scaling: float) -> None:
        """Let requests name another adapter, or another one of that name.

        Raises:
            ConfigError: it is none of this model.
        """
        loaded = Adapter.load(folder, self.model, scaling=scaling)
        self.adapters = {**self.adapters, name: loaded}

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; running texts keep it."""
        self.adapters = {n: one for n, one in self.adapters.items() if n != name}
        self.default_adapters = [n for n in self.default_adapters if n != name]
        self._scaled.cache_clear()

    def _ready(self) -> _Running:
        """Return what runs texts; raises 503 if the host takes no requests."""
        self.look()
        if self._running is None or self.state != "ready":
            raise ApiError(503, f"the server is {self.state}; try again later", code=self.state)
        return self._running

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of work that takes long."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def begin(self, make: Callable[[], AnswerPlan], key: Key = ANYONE) -> RunningAnswer:
        """Prepare a plan's texts beside the running ones, and start them when it is their turn.

        Raises:
            ApiError: too many wait, or the host takes none.
            Exl2FlowError: what mapping or the generator refuses.
        """
        self._ready()
        if self.count >= self.options.slots + self.options.waiting:
            why = f"{self.count} requests are running or waiting; try again later"
            raise ApiError(429, why, retry_after=self._queue.advice)
        began, turn = time.monotonic(), None
        self._entering += 1
        try:
            async with self._turns.of(key.name):
                plan, warnings = await self.in_thread(make), list[str]()
            for given in plan.requests[0].filters:
                given = getattr(given, "then", given)  # behind thoughts
                if isinstance(given, GrammarFilter):
                    warnings += await self.trial.check(given, key.name)
            asked, limit = time.monotonic(), self.options.wait_seconds
            turn = await self._queue.enter(key, len(plan.requests), seconds=limit)
            waited = time.monotonic() - asked
            answer = await self._started(plan, began=began, waited=waited, warnings=warnings)
        except BaseException:
            if turn is not None:
                self._queue.leave(turn)
            raise
        finally:
            self._entering -= 1
        self.answers[answer] = turn
        return answer

    async def _started(
        self, plan: AnswerPlan, *, began: float, waited: float, warnings: Sequence[str]
    ) -> RunningAnswer:
        running, events = self._ready(), asyncio.Queue[Event]()
        loop, thread = asyncio.get_running_loop(), running.thread
        try:
            jobs = await self.in_thread(
                lambda: [thread.prepare(one, events, loop) for one in plan.requests]
            )
            self._check_runs(running)
            for job in jobs:
                thread.add(job)
        except Exception:  # what a failed generator refuses is not the fault of the client
            self._check_runs(running)
            raise
        return RunningAnswer(plan, jobs, events, began=began, waited=waited, warnings=warnings)

    def end(self, answer: RunningAnswer) -> None:
        """Forget an answer, whose texts end within a step."""
        answer.cancel()
        answer.let_go()
        if turn := self.answers.pop(answer, None):
            self._queue.leave(turn)
        self.look()

    def look(self) -> None:
        """Make a generator that has failed anew, unless another one failed within the hour."""
        failure = None if self.generator is None else self.generator.failure
        if failure is None or self.state != "ready":
            return
        log.error("the generator failed: %s", "".join(format_exception(failure)).rstrip())
        before, self._failed_at = self._failed_at, time.monotonic()
        if self.is_lost or self._failed_at - before < SOUND_SECONDS:
            self.state = "failed"
            return
        self.state = "recovering"
        self._recovery = asyncio.get_running_loop().create_task(self._recover())

    def _check_runs(self, running: _Running) -> None:
        """Raise 503 if a generator that was to run a request has failed since."""
        if self._ready() is not running:
            raise ApiError(503, "the generator was made anew; try again", code="recovering")

    async def _recover(self) -> None:
        """Free the cache, then make a generator, unless the host is to be closed."""
        try:
            await self._close_generator()
            await asyncio.to_thread(collect)
            if self.state != "recovering":
                return
            self._running = _Running(await asyncio.to_thread(self._warm))
            if self.state == "recovering":
                self.state = "ready"
        except Exception:
            log.exception("no new generator can be made; restart the server")
            self.state = "failed"

    def _warm(self) -> Generator:
        generator = self._make()
        try:
            generator.warmup()
        except BaseException:
            generator.close()
            raise
        return generator

    async def _close_generator(self) -> None:
        """End the generator and its thread, and all that refers to it, so that its cache goes."""
        running, self._running = self._running, None
        if running is None:
            return
        await running.thread.close()
        for answer in self.answers:  # their clients may be slow
            answer.let_go()
        if running.generator.failure is not None:
            _forget_frames(running.generator.failure)
        await asyncio.to_thread(running.generator.close)

    def cancel(self) -> None:
        """End all texts, within a step."""
        for answer in self.answers:
            answer.cancel()

    async def close(self) -> None:
        """End all texts and the threads, also of a generator that is being made."""
        self.state = "draining"
        try:
            if self._recovery is not None:
                await asyncio.wait({self._recovery})
            await self._close_generator()
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self.trial.close()
            forget()


def _forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and its causes: their frames hold a generator."""
    seen, rest = set[int](), [error]
    while rest:
        one = rest.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            rest += [each for each in (one.__cause__, one.__context__) if each is not None]


def collect() -> None:
    """Give the memory of what is gone back to the device and to the system."""
    only_new_are_collected()
    with suppress(AttributeError):  # glibc keeps what threads have freed, unless it is told
        ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
