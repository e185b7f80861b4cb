"""The dynamic generator for asyncio: it works in a thread, and each job has a queue of results."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from exl2flow.compat.exllamav2.generator.dynamic import ExLlamaV2DynamicGenerator
from exl2flow.compat.exllamav2.generator.job import ExLlamaV2DynamicJob


class ExLlamaV2DynamicGeneratorAsync:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generator = ExLlamaV2DynamicGenerator(*args, **kwargs)
        self._queues = dict[ExLlamaV2DynamicJob, asyncio.Queue[Any]]()
        self._wake, self._is_open = asyncio.Event(), True
        self._task = asyncio.create_task(self._run())

    def enqueue(self, job: "ExLlamaV2DynamicJobAsync") -> int:
        serial: int = self.generator.enqueue(job.job)
        self._queues[job.job] = job.queue
        self._wake.set()
        return serial

    async def cancel(self, job: "ExLlamaV2DynamicJobAsync") -> None:
        self.generator.cancel(job.job)
        if self._queues.pop(job.job, None) is not None:
            job.queue.put_nowait(None)

    async def close(self) -> None:
        self._is_open = False
        self._wake.set()
        await self._task
        self.generator.clear_queue()
        for queue in self._queues.values():
            queue.put_nowait(None)

    async def _run(self) -> None:
        while self._is_open:
            await self._wake.wait()
            try:
                found = await asyncio.to_thread(self.generator.queue.step)
            except Exception as error:  # of the device: all jobs end
                found = [(job, error) for job in self._queues]
            for job, result in found:
                if job in self._queues:
                    self._queues[job].put_nowait(result)
                    if isinstance(result, Exception) or result["eos"]:
                        del self._queues[job]
            if not self._queues and self._is_open:
                self._wake.clear()


class ExLlamaV2DynamicJobAsync:
    """A job that is in the queue at once; `async for` yields its results until it ends."""

    def __init__(
        self, generator: ExLlamaV2DynamicGeneratorAsync, *args: Any, **kwargs: Any
    ) -> None:
        self.generator, self.queue = generator, asyncio.Queue[Any]()
        self.job = ExLlamaV2DynamicJob(*args, **kwargs)
        generator.enqueue(self)

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        while (result := await self.queue.get()) is not None:
            if isinstance(result, Exception):
                raise result
            yield result
            if result["eos"]:
                return

    async def cancel(self) -> None:
        await self.generator.cancel(self)
