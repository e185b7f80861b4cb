"""`AsyncGenerator`: a generator with a thread of its own, for programs with event loops."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.request import Request
from exl2flow.inference.generate.event import Event
from exl2flow.inference.generate.generator import Generator
from exl2flow.inference.generate.job import Job

log = logging.getLogger(__name__)


class AsyncGenerator(AbstractAsyncContextManager["AsyncGenerator"]):
    """Runs a generator as long as it has jobs; any thread and any event loop may submit.

    Nothing else may call the generator's `step` meanwhile.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._wake = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="exl2flow-generator", daemon=True)
        self._thread.start()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all jobs and the thread."""
        with self._wake:
            self._is_open = False
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def submit(
        self,
        request: Request,
        events: "asyncio.Queue[Event]",
        *,
        note: Callable[[Event], object] | None = None,
    ) -> Job:
        """Put a request in the queue; the running event loop finds its events in `events`.

        Closing that loop ends the job. `note` sees each event first, in the generator's thread.

        Raises:
            Exl2FlowError: what `Generator.submit` refuses.
        """
        loop = asyncio.get_running_loop()

        def deliver(event: Event) -> None:
            if note is not None:
                note(event)
            try:
                loop.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:  # the loop is closed
                job.cancel()

        with self._wake:
            if not self._is_open:
                raise ConfigError("the generator is closed; make a new `AsyncGenerator`")
            job = self._generator.submit(request, deliver=deliver)
            self._wake.notify()
        return job

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """Yield the events of a request; giving the iteration up ends the job.

        Raises:
            Exl2FlowError: what `Generator.submit` refuses, or what ended the job.
        """
        events = asyncio.Queue[Event]()
        job = self.submit(request, events)
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

    def _run(self) -> None:
        while self._is_needed():
            self._work(self._generator.step)
        self._work(self._generator.cancel_all)

    def _is_needed(self) -> bool:
        """Wait for work; False: there will be none."""
        with self._wake:
            self._wake.wait_for(lambda: not self._is_open or not self._generator.is_idle)
            return self._is_open

    def _work(self, work: Callable[[], object]) -> None:
        """Do a part of the work; an error, for which the thread has no caller, ends all jobs."""
        try:
            work()
        except Exception as error:
            if not self._generator.fail(error):
                log.exception("the generator failed when it had no job")
