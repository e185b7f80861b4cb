"""A loaded model as a server needs it: its generator, formats and adapters, and what it admits."""

import asyncio
import ctypes
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
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


class Engine:
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
    ) -> None:
        """Make the generator; `make` is called again after a failure."""
        self.model, self.options, self.defaults = model, options, defaults
        self.adapters = {one.folder.name: one for one in adapters}
        self.default_adapters = [*self.adapters]
        self.name, self.created = model.spec.source_dir.resolve().name, int(time.time())
        self.tokenizer, self.width = model.tokenizer, model.spec.vocab_size
        self.load_seconds, self.tokens = 0.0, Names(model.tokenizer)
        self._make, self._failed_at, self.generator = make, -math.inf, make()
        self._recovery: asyncio.Task[None] | None = None
        self.pages = self.generator.pages
        self.room = min(self.generator.context, self.pages * self.generator.page_tokens)
        self.tokenizer.most = max(self.room, MOST_IDS)
        self.trial, self.warnings = Trial(self.tokenizer, self.width), list[str]()
        self._scaled = lru_cache(SCALED)(Adapter.scaled)  # adapters of equal content are equal
        self.reader, template = None, ""
        if fmt is not None:
            self.reader = Reader(fmt, self.tokenizer, NAMES, now=datetime.now())
            template = fmt.template
        self.tool_format = tool_format(template, self.tokenizer.backend.get_vocab())
        if options.tool_format is not None:
            self.tool_format = named_tool_format(options.tool_format)
        if self.reader is not None and self.tool_format.is_generic:
            self.warnings.append(NO_TOOLS)
        self.has_grammars, self._entering = False, 0
        self.state: State = "ready"
        self.answers = dict[RunningAnswer, Admission]()
        self._turns = Turns(PREPARING)
        self._queue = FairQueue(options.slots + AHEAD)
        self._pool = ThreadPoolExecutor(PREPARING, "exl2flow-serve")

    def start(self) -> None:
        """Warm up, and run the generator; the first grammar holds other threads up, so it is now.

        Raises:
            InferenceError: the model does not run.
        """
        self.generator.warmup()
        if self.options.tool_grammar == "on":
            try:
                GrammarFilter(regex="a").start(self.tokenizer, self.width)
                self.has_grammars = True
            except ConfigError as error:  # llguidance is missing, or cannot read the tokenizer
                self.warnings.append(f"no grammars: {shown(error)}")
        self._running = AsyncGenerator(self.generator, pause=PAUSE)

    @property
    def names(self) -> list[str]:
        """The names of the model, alone and with each adapter."""
        return [self.name, *(f"{self.name}:{adapter}" for adapter in self.adapters)]

    @property
    def is_lost(self) -> bool:
        """Whether the model cannot run again: a process that shares it is gone."""
        return self.model.team is not None and self.model.team.failure is not None

    @property
    def progress(self) -> int | None:
        """Steps of the generator so far, None while it has nothing to do or is made."""
        made = self._made
        return None if made is None or made.is_idle else self._running.steps

    @property
    def free_pages(self) -> int:
        """Pages of the cache that no text uses."""
        return 0 if self._made is None else self._made.free_pages

    @property
    def preemptions(self) -> int:
        """How often texts had to wait for others' pages."""
        return 0 if self._made is None else self._made.preemptions

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Bytes of pages in host memory (ram) and on disk."""
        return {"ram": 0, "disk": 0} if self._made is None else self._made.tier_bytes

    @property
    def _made(self) -> Generator | None:
        """The generator, unless it failed and there is no new one yet."""
        return vars(self).get("generator")

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

    def check_ready(self) -> None:
        """Raise 503 if the engine takes no requests."""
        self.look()
        if self.state != "ready":
            raise ApiError(503, f"the server is {self.state}; try again later", code=self.state)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of work that takes long."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def begin(self, make: Callable[[], AnswerPlan], key: Key = ANYONE) -> RunningAnswer:
        """Prepare a plan's texts beside the running ones, and start them when it is their turn.

        Raises:
            ApiError: too many wait, or the engine takes none.
            Exl2FlowError: what mapping or the generator refuses.
        """
        self.check_ready()
        if self.count >= self.options.slots + self.options.waiting:
            why = f"{self.count} requests are running or waiting; try again later"
            raise ApiError(429, why, retry_after=self._queue.advice)
        began, turn = time.monotonic(), None
        self._entering += 1
        try:
            async with self._turns.of(key.name):
                plan = await self.in_thread(make)
            for given in plan.requests[0].filters:
                given = getattr(given, "then", given)  # behind thoughts
                if isinstance(given, GrammarFilter):
                    plan.warnings.extend(await self.trial.check(given, key.name))
            limit = self.options.wait_seconds
            asked = time.monotonic()
            turn = await self._queue.enter(key, len(plan.requests), seconds=limit)
            answer = await self._started(plan, began=began, waited=time.monotonic() - asked)
        except BaseException:
            if turn is not None:
                self._queue.leave(turn)
            raise
        finally:
            self._entering -= 1
        self.answers[answer] = turn
        return answer

    async def _started(self, plan: AnswerPlan, *, began: float, waited: float) -> RunningAnswer:
        """Start the texts of a plan whose turn has come."""
        self.check_ready()
        loop, events, running = asyncio.get_running_loop(), asyncio.Queue[Event](), self._running
        try:
            jobs = await self.in_thread(
                lambda: [running.prepare(one, events, loop) for one in plan.requests]
            )
            self._check_runs(running)
            for job in jobs:
                running.add(job)
        except Exception:
            self._check_runs(running)  # what a failed generator refuses is no fault of the client
            raise
        return RunningAnswer(plan, jobs, events, began=began, waited=waited)

    def end(self, answer: RunningAnswer) -> None:
        """Forget an answer, whose texts end within a step."""
        answer.cancel()
        answer.let_go()
        if turn := self.answers.pop(answer, None):
            self._queue.leave(turn)
        self.look()

    def look(self) -> None:
        """Make a generator that has failed anew, unless another one failed within the hour."""
        failure = None if self._made is None else self._made.failure
        if failure is None or self.state != "ready":
            return
        log.error("the generator failed: %s", "".join(format_exception(failure)).rstrip())
        before, self._failed_at = self._failed_at, time.monotonic()
        if self.is_lost or self._failed_at - before < SOUND_SECONDS:
            self.state = "failed"
            return
        self.state = "recovering"
        self._recovery = asyncio.get_running_loop().create_task(self._recover())

    def _check_runs(self, running: AsyncGenerator) -> None:
        """Raise 503 if a generator that was to run a request has failed since."""
        self.check_ready()
        if running is not self._running:
            raise ApiError(503, "the generator was made anew; try again", code="recovering")

    async def _recover(self) -> None:
        """Free the cache, then make a generator, unless the engine is to be closed."""
        try:
            await self._close_generator()
            await asyncio.to_thread(collect)
            if self.state != "recovering":
                return
            self.generator = await asyncio.to_thread(self._warm)
            self._running = AsyncGenerator(self.generator, pause=PAUSE)
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
        running, generator = vars(self).pop("_running", None), vars(self).pop("generator", None)
        if running is not None:
            await running.close()
        for answer in self.answers:  # their clients may be slow
            answer.let_go()
        if generator is not None:
            if generator.failure is not None:
                _forget_frames(generator.failure)
            await asyncio.to_thread(generator.close)

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
