"""`AsyncGenerator`: a generator with a thread of its own, for programs with event loops.

Requests are prepared in other threads than the one that runs the steps, so neither a long prompt
nor a slow grammar stops a running text. All events of a step enter each event loop in one call.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple
from weakref import WeakSet

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.request import Request
from exl2flow.engine.generate.event import Event
from exl2flow.engine.generate.generator import Generator
from exl2flow.engine.generate.job import Job

log = logging.getLogger(__name__)
PREPARING = 4  # requests that `stream` prepares at once
QUICK = 4096  # characters of a prompt that is encoded in about 1 ms

Queue = asyncio.Queue[Event]


class _Delivery(NamedTuple):
    job: Job
    queue: Queue
    event: Event


class AsyncGenerator(AbstractAsyncContextManager["AsyncGenerator"]):
    """Runs a generator as long as it has jobs; any thread and any event loop may submit.

    Nothing else may call the generator's `step` meanwhile. steps: how many it has done. With a
    `pause`, texts that run on are told at most once in that many seconds, the rest at once.
    """

    def __init__(self, generator: Generator, *, pause: float = 0.0) -> None:
        self._generator, self._pause = generator, pause
        self._told, self._begun = 0.0, WeakSet[Job]()  # when it was; jobs whose text has begun
        self._wake = threading.Condition()
        self._is_open, self.steps = True, 0
        self._deliveries = dict[asyncio.AbstractEventLoop, list[_Delivery]]()  # of this step
        self._preparing = ThreadPoolExecutor(PREPARING, "exl2flow-prepare")
        self._thread = threading.Thread(target=self._run, name="exl2flow-generator", daemon=True)
        self._thread.start()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all jobs and the thread; requests that are being prepared are refused."""
        with self._wake:
            self._is_open = False
            self._preparing.shutdown(wait=False)
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def submit(
        self, request: Request, events: Queue, *, note: Callable[[Event], object] | None = None
    ) -> Job:
        """Put a request in the queue; the running event loop finds its events in `events`.

        The request is prepared in the calling thread. Closing that loop ends the job. `note` sees
        each event first, in the generator's thread.

        Raises:
            Exl2FlowError: what `Generator.submit` refuses.
        """
        return self.add(self.prepare(request, events, asyncio.get_running_loop(), note=note))

    def prepare(
        self,
        request: Request,
        events: Queue,
        loop: asyncio.AbstractEventLoop,
        *,
        note: Callable[[Event], object] | None = None,
    ) -> Job:
        """Do the part of `submit` that takes long, in any thread; `add` does the rest.

        `loop`, which need not run in this thread, finds the job's events in `events`.

        Raises:
            Exl2FlowError: what `Generator.prepare` refuses, or the generator is closed.
        """

        def deliver(event: Event) -> None:
            if note is not None:
                note(event)
            self._deliveries.setdefault(loop, []).append(_Delivery(job, events, event))

        self._check_open()
        job = self._generator.prepare(request, deliver=deliver)
        return job

    def add(self, job: Job) -> Job:
        """Put a job from `prepare` in the queue and return it.

        Raises:
            Exl2FlowError: what `Generator.add` refuses, or the generator is closed.
        """
        with self._wake:
            self._check_open()
            self._generator.add(job)
            self._wake.notify()
        return job

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """Yield the events of a request; giving the iteration up ends the job.

        A request that may take long to prepare joins the queue when it is prepared, so others can
        come before it; the event loop goes on meanwhile.

        Raises:
            Exl2FlowError: what `Generator.submit` refuses, or what ended the job.
        """
        events = Queue()
        job = self.add(await self._prepared(request, events))
        try:
            while True:
                event = await events.get()
                yield event
                if event.error is not None:
                    raise event.error
                if event.reason is not None:
                    return
        finally:
            with self._wake:
                job.cancel()
                self._wake.notify()

    async def generate(self, request: Request) -> str:
        """Return the completion of a request; see `stream`."""
        return "".join([event.text async for event in self.stream(request)])

    async def _prepared(self, request: Request, events: Queue) -> Job:
        """Prepare a request, in a thread of the pool if that may take long."""
        loop = asyncio.get_running_loop()
        if is_quick(request):
            return self.prepare(request, events, loop)
        with self._wake:  # the pool refuses work after `close`
            self._check_open()
            prepared = loop.run_in_executor(self._preparing, self.prepare, request, events, loop)
        return await prepared

    def _check_open(self) -> None:
        if not self._is_open:
            raise ConfigError("the generator is closed; make a new `AsyncGenerator`")

    def _run(self) -> None:
        try:
            while self._is_needed():
                self._work(self._generator.step)
                self.steps += 1
            self._work(self._generator.cancel_all)
        finally:
            self._is_open = False  # should it end otherwise, requests are refused

    def _is_needed(self) -> bool:
        """Wait for work; False: there will be none."""
        with self._wake:
            self._wake.wait_for(lambda: not self._is_open or not self._generator.is_idle)
            return self._is_open

    def _work(self, work: Callable[[], object]) -> None:
        """Do a part of the work; an error, for which the thread has no caller, ends all jobs."""
        try:
            work()
        except BaseException as error:  # also what would end a program: this is a thread
            if not self._generator.fail(error):
                log.exception("the generator failed when it had no job")
        now = time.monotonic()
        if now - self._told < self._pause and not self._is_urgent():
            return
        self._told = now
        deliveries, self._deliveries = self._deliveries, {}
        for loop, of_loop in deliveries.items():
            try:
                loop.call_soon_threadsafe(_put, loop, of_loop)
            except RuntimeError:  # the loop is closed
                for job in {one.job for one in of_loop}:
                    job.cancel()

    def _is_urgent(self) -> bool:
        """Return whether something was produced beside further text of running jobs."""
        found = False
        for of_loop in self._deliveries.values():
            for job, _, event in of_loop:
                is_text = event.stage == "text" and event.reason is None
                found |= not is_text or job not in self._begun
                if is_text:
                    self._begun.add(job)
        return found


def is_quick(request: Request) -> bool:
    """Return whether a request is prepared in so little time that a thread is not worth it."""
    if request.filters or request.embeddings or request.heal:  # `heal` decodes all pieces once
        return False
    return sum(len(part) for part in request.prompts) <= QUICK


def _put(loop: asyncio.AbstractEventLoop, deliveries: list[_Delivery]) -> None:
    """Put events in their queues; one that is full loses its own event only."""
    for _, queue, event in deliveries:
        try:
            queue.put_nowait(event)
        except Exception as error:
            message = "an event of a text does not fit in its queue"
            loop.call_exception_handler({"message": message, "exception": error})
