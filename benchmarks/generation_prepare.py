"""What requests that take long to prepare cost a running text: a mode of `generation.py`."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from statistics import median

from generation_jobs import GREEDY, request

from exl2flow.core.errors import ContextOverflow
from exl2flow.engine.filters import GrammarFilter
from exl2flow.inference import AsyncGenerator, Event, Generator, LoadedModel, Request

SENTENCE = "The quick brown fox counts 3.14 of its 17 naïve friends, doesn't it?\n"


def prepare(model: LoadedModel, form: str) -> None:
    """Compare the longest wait for a token alone, beside a long prompt and beside a big grammar."""
    asyncio.run(_prepare(model, form))


async def _prepare(model: LoadedModel, form: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            f"a{i}": {"enum": [f"value {i} {k}" for k in range(2000)]} for i in range(20)
        },
    }
    works: dict[str, Callable[[AsyncGenerator], object]] = {
        "nothing": lambda engine: time.sleep(1),
        "1,380,000 characters": lambda engine: _ask(engine, Request(20_000 * SENTENCE)),
        "a grammar": lambda engine: _ask(
            engine, Request("a", filters=[GrammarFilter(json_schema=schema)], max_new_tokens=2)
        ),
    }
    async with AsyncGenerator(Generator(model, cache=form, tokens=1024, slots=4)) as engine:
        for name, work in works.items():
            longest, usual, taken = await _waits(engine, model, work)
            print(
                f"| {name} | {taken:.2f} s | longest wait for a token {1e3 * longest:.1f} ms "
                f"| median {1e3 * usual:.1f} ms |",
                flush=True,
            )


def _ask(engine: AsyncGenerator, wanted: Request) -> None:
    with suppress(ContextOverflow):  # it was encoded all the same
        asyncio.run(engine.generate(wanted))


async def _waits(
    engine: AsyncGenerator, model: LoadedModel, work: Callable[[AsyncGenerator], object]
) -> tuple[float, float, float]:
    """Return the longest and the median wait for a token of a text beside `work`, and its time."""
    times, done = list[float](), threading.Event()

    def note(event: Event) -> None:
        if event.ids:
            times.append(time.perf_counter())

    async def text() -> None:
        while not done.is_set():
            events = asyncio.Queue[Event]()
            engine.submit(request(model, 8, 400, 0, settings=GREEDY), events, note=note)
            while (await events.get()).reason is None:
                pass

    running = asyncio.create_task(text())
    await asyncio.sleep(0.3)
    begun = time.perf_counter()
    await asyncio.to_thread(work, engine)
    end = time.perf_counter()
    done.set()
    await running
    waits = [
        after - before for before, after in pairwise(times) if begun <= after and before <= end
    ]
    return max(waits), median(waits), end - begun
