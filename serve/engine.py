"""A loaded model as a server needs it: its generator, formats and adapters, and what it admits."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, Literal

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.serving import ServeOptions
from exl2flow.core.requests.conversation import PromptFormat
from exl2flow.inference import Adapter, AsyncGenerator, Event, Generator, LoadedModel
from exl2flow.inference.chat import named_tool_format, tool_format
from exl2flow.inference.chat.history import Reader
from exl2flow.inference.filters import GrammarFilter
from exl2flow.inference.filters.trial import Trial
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.serve.answers import AnswerPlan, RunningAnswer
from exl2flow.serve.errors import ApiError

log = logging.getLogger("exl2flow.serve")
PREPARING = 4  # requests that are rendered, encoded and compiled at once
NAMES = ("User", "Assistant")  # in format `raw`
State = Literal["ready", "draining", "recovering", "failed"]


class Engine:
    """One model. state: whether it takes requests. warnings: about the model, for its clients.

    has_grammars: whether calls of functions are forced. reader: writes conversations; None: the
    model has no prompt format. defaults: of the sampler.
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
        self.model, self.options, self.defaults, self.adapters = model, options, defaults, adapters
        self.name, self.created = model.spec.source_dir.resolve().name, int(time.time())
        self.tokenizer = model.tokenizer
        self._make, self._is_remade = make, False
        self.generator = make()
        self.pages = self.generator.pages
        self._room = min(self.generator.context, self.pages * PAGE_TOKENS)
        self.width = model.spec.vocab_size
        self.trial = Trial(self.tokenizer, self.width)
        self.reader: Reader | None = None
        self.warnings = list[str]()
        self.tool_format = tool_format("", ())
        if fmt is not None:
            self.reader = Reader(fmt, self.tokenizer, NAMES, now=datetime.now())
            vocabulary = self.tokenizer.backend.get_vocab()
            self.tool_format = tool_format(fmt.template, vocabulary)
        if options.tool_format is not None:
            self.tool_format = named_tool_format(options.tool_format)
        if self.reader is not None and self.tool_format.is_generic:
            self.warnings.append("the template shows no tools; they go into the system prompt")
        self.has_grammars = False
        self.state: State = "ready"
        self.answers = set[RunningAnswer]()
        self._entering = 0
        self._pool = ThreadPoolExecutor(PREPARING, "exl2flow-serve")
        self._running: AsyncGenerator | None = None

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
                self.warnings.append(f"no grammars: {error}")
        self._running = AsyncGenerator(self.generator)

    @property
    def room(self) -> int:
        """Most tokens of one text, prompt included."""
        return self._room

    @property
    def free_pages(self) -> int:
        """Pages of the cache that no text uses."""
        return self.generator.free_pages if self.state != "recovering" else 0

    @property
    def count(self) -> int:
        """Requests that are prepared, wait or run."""
        return len(self.answers) + self._entering

    def check_ready(self) -> None:
        """Raise 503 if the engine takes no requests."""
        if self.state != "ready":
            raise ApiError(503, f"the server is {self.state}; try again later", code=self.state)

    async def begin(self, make: Callable[[], AnswerPlan]) -> RunningAnswer:
        """Prepare a plan's texts beside the running ones, and put them in the queue.

        Raises:
            ApiError: too many wait, or the engine takes none.
            Exl2FlowError: what mapping or the generator refuses.
        """
        self.check_ready()
        if self.count >= self.options.slots + self.options.waiting:
            raise ApiError(429, f"{self.count} requests are running or waiting; try again later")
        loop, events, running = asyncio.get_running_loop(), asyncio.Queue[Event](), self._running
        assert running is not None

        def prepared() -> tuple[AnswerPlan, list[Any]]:
            plan = make()
            return plan, [running.prepare(one, events, loop) for one in plan.requests]

        self._entering += 1
        try:
            plan, jobs = await loop.run_in_executor(self._pool, prepared)
        finally:
            self._entering -= 1
        self.check_ready()
        answer = RunningAnswer(plan, jobs, events)
        for job in jobs:
            running.add(job)
        self.answers.add(answer)
        return answer

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        """Return the result of work that takes long."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def end(self, answer: RunningAnswer) -> None:
        """Forget an answer, and make a failed generator anew, once."""
        answer.cancel()
        self.answers.discard(answer)
        if self.generator.failure is not None and self.state in ("ready", "draining"):
            if self._is_remade:
                self.state = "failed"
                log.error("the generator failed again; restart the server")
            else:
                self.state, self._is_remade = "recovering", True
                self._recovery = asyncio.get_running_loop().create_task(self._recover())

    async def _recover(self) -> None:
        log.error("the generator failed: %s; a new one starts", self.generator.failure)
        try:
            assert self._running is not None
            await self._running.close()
            self._running = None
            del self.generator  # frees the cache
            self.generator = await asyncio.to_thread(self._make)
            self._running = AsyncGenerator(self.generator)
            self.state = "ready"
        except Exception:
            log.exception("no new generator can be made; restart the server")
            self.state = "failed"

    async def drain(self, seconds: float) -> None:
        """Take no more requests, and give those that run some time."""
        self.state = "draining"
        deadline = time.monotonic() + seconds
        while self.count and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for answer in [*self.answers]:
            answer.cancel()

    async def close(self) -> None:
        """End all texts and the threads."""
        if self._running is not None:
            await self._running.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.trial.close()
