"""The dynamic generator for asyncio: it works in a thread, and each job has a queue of events."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from exl2flow.compat.exllamav2.generator.dynamic import (
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
)
from exl2flow.engine import AsyncGenerator, Event


class ExLlamaV2DynamicGeneratorAsync:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generator = ExLlamaV2DynamicGenerator(*args, **kwargs)
        self.native = AsyncGenerator(self.generator.native)

    def enqueue(self, job: "ExLlamaV2DynamicJobAsync") -> int:
        submit = partial(self.native.submit, events=job.events, note=self.generator.note)
        return self.generator.add(job.job, submit)

    async def cancel(self, job: "ExLlamaV2DynamicJobAsync") -> None:
        if job.job in self.generator.jobs and job.job.native is not None:
            job.is_over = True
            del self.generator.jobs[job.job]
            job.job.native.cancel()  # its pages are freed by the thread, before its next step

    async def close(self) -> None:
        await self.native.close()


class ExLlamaV2DynamicJobAsync:
    """A job that is enqueued immediately; `async for` yields its results until it ends."""

    def __init__(
        self, generator: ExLlamaV2DynamicGeneratorAsync, *args: Any, **kwargs: Any
    ) -> None:
        self.generator, self.events = generator, asyncio.Queue[Event]()
        self.job, self.is_over = ExLlamaV2DynamicJob(*args, **kwargs), False
        generator.enqueue(self)

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        while not self.is_over:
            event = await self.events.get()
            if self.is_over:  # cancelled meanwhile
                break
            self.is_over = event.reason is not None
            for result in self.generator.generator.results(event):
                yield result

    async def cancel(self) -> None:
        await self.generator.cancel(self)
