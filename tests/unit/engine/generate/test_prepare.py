"""Requests that are prepared in one thread while the generator's steps run in another."""

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from small_pages import is_empty

from exl2flow.core.errors import ConfigError, ContextOverflow, InferenceError
from exl2flow.engine.filters import Allowed
from exl2flow.engine.generate import job as job_module
from exl2flow.engine.generate.asynchronous import QUICK
from exl2flow.inference import (
    AsyncGenerator,
    Event,
    Generator,
    LoadedModel,
    Request,
    SamplingSettings,
)

GREEDY = SamplingSettings.greedy()
PATIENCE = 30  # seconds until a test that would wait forever fails


class Free:
    """A constraint that allows everything."""

    def allowed(self) -> Allowed:
        return Allowed(None, may_end=True)

    def accept(self, token: int) -> None: ...
    def rollback(self, count: int) -> None: ...


class Slow:
    """A filter whose start waits until it is released, and then fails if it has an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.is_starting = error, threading.Event()
        self.is_released, self.is_started = threading.Event(), threading.Event()

    def start(self, tokenizer: object, width: int, prefix: str = "") -> Free:
        self.is_starting.set()
        assert self.is_released.wait(PATIENCE)
        self.is_started.set()
        if self.error is not None:
            raise self.error
        return Free()

    async def starts(self) -> None:
        assert await asyncio.to_thread(self.is_starting.wait, PATIENCE)


def request(i: int, *, tokens: int = 12, **more: Any) -> Request:
    options = {"max_new_tokens": tokens, "settings": GREEDY, "stops": (), "tag": i}
    return Request(**({"prompt": (5, 6, 7 + i)} | options | more))


def text_of(generator: Generator, wanted: Request) -> str:
    return "".join(event.text for event in generator.stream(wanted))


def elsewhere(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE)


def run(main: Any) -> Any:
    return asyncio.run(asyncio.wait_for(main, PATIENCE))


def test_a_prepared_job_takes_nothing_and_gives_the_same_text(generator: Generator) -> None:
    expected, jobs = text_of(generator, request(1)), []

    elsewhere(lambda: jobs.append(generator.prepare(request(1))))
    assert is_empty(generator)
    assert generator.step() == []

    generator.add(jobs[0])
    assert not generator.is_idle
    text = ""
    while not generator.is_idle:
        text += "".join(event.text for event in generator.step())
    assert text == expected


def test_jobs_wait_in_the_order_in_which_they_are_added(model: LoadedModel) -> None:
    generator = Generator(model, tokens=1024, slots=1)
    jobs = [generator.prepare(request(i)) for i in range(3)]
    for i in (2, 0, 1):
        generator.add(jobs[i])

    ends = list[object]()
    while not generator.is_idle:
        ends += [event.tag for event in generator.step() if event.reason is not None]

    assert ends == [2, 0, 1]


def test_a_job_is_added_once_and_only_by_who_prepared_it(generator: Generator) -> None:
    other = Generator(generator.model, tokens=1024, slots=1)
    job = generator.prepare(request(1))
    with pytest.raises(ConfigError, match="another generator prepared it"):
        other.add(job)
    generator.add(job)
    with pytest.raises(ConfigError, match="was added before"):
        generator.add(job)
    generator.cancel(job)
    with pytest.raises(ConfigError, match="was added before"):
        generator.add(job)
    assert is_empty(generator)


def test_a_prepared_job_that_is_dropped_is_forgotten(generator: Generator) -> None:
    generator.prepare(request(1))
    gc.collect()

    assert len(generator._prepared) == 0


@pytest.mark.parametrize("way", ["at the next step", "at once", "a step before"])
def test_a_job_cancelled_between_preparing_and_adding_only_ends(
    generator: Generator, way: str
) -> None:
    events = list[Event]()
    job = generator.prepare(request(1), deliver=events.append)
    generator.cancel(job) if way == "at once" else job.cancel()
    if way == "a step before":
        generator.step()

    generator.add(job)
    while not generator.is_idle:
        generator.step()

    assert [(event.stage, event.reason) for event in events] == [("text", "cancelled")]
    assert text_of(generator, request(2))  # the queue goes on behind it
    assert is_empty(generator)


def test_the_wait_is_counted_from_adding_on(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(job_module, "time", clock)
    events = list[Event]()
    job = generator.prepare(request(1), deliver=events.append)
    clock.now += 50
    generator.add(job)
    clock.now += 3
    while not generator.is_idle:
        generator.step()

    assert events[-1].statistics is not None
    assert events[-1].statistics.waiting_seconds == 3


def test_a_failed_generator_neither_prepares_nor_adds(model: LoadedModel) -> None:
    generator = Generator(model, tokens=1024, slots=1)
    job = generator.prepare(request(1))
    generator.fail(RuntimeError("CUDA error: of a test"))

    with pytest.raises(InferenceError, match="CUDA error"):
        generator.add(job)
    with pytest.raises(InferenceError, match="CUDA error"):
        generator.prepare(request(1))
    assert is_empty(generator)


def test_other_texts_begin_and_end_while_a_filter_starts(generator: Generator) -> None:
    expected = [text_of(generator, request(i)) for i in range(3)]
    slow = Slow()

    async def main() -> list[str]:
        async with AsyncGenerator(generator) as engine:
            late = asyncio.create_task(engine.generate(request(0, filters=[slow])))
            await slow.starts()
            others = [await engine.generate(request(i)) for i in (1, 2)]
            slow.is_released.set()
            return [await late, *others]

    assert run(main()) == expected
    assert is_empty(generator)


def test_a_submission_in_another_thread_stops_no_running_text(generator: Generator) -> None:
    """`submit` prepares in the thread that calls it."""
    slow = Slow()

    async def submitted(engine: AsyncGenerator) -> Event:
        engine.submit(request(0, filters=[slow]), events := asyncio.Queue[Event]())
        while (event := await events.get()).reason is None:
            pass
        return event

    async def main() -> tuple[str, Event]:
        async with AsyncGenerator(generator) as engine:
            running = engine.stream(request(1, tokens=100))
            text = (await anext(running)).text
            late = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(submitted(engine))))
            await slow.starts()
            text += "".join([event.text async for event in running])
            slow.is_released.set()
            return text, await late

    text, end = run(main())
    assert text == text_of(generator, request(1, tokens=100))
    assert end.reason == "max_new_tokens"


def test_other_texts_go_on_while_a_long_prompt_is_encoded(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, slow, long = generator.model.tokenizer, Slow(), "word " * QUICK
    encode = tokenizer.encode

    def encoded(text: str, **options: bool) -> list[int]:
        if text == long:
            slow.start(tokenizer, 0)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", encoded)

    async def main() -> str:
        async with AsyncGenerator(generator) as engine:
            late = asyncio.create_task(engine.generate(request(0, prompt=long)))
            await slow.starts()
            text = await engine.generate(request(1))
            slow.is_released.set()
            with pytest.raises(ContextOverflow, match="shorten the prompt"):
                await late
            return text

    assert run(main())
    assert is_empty(generator)


@pytest.mark.parametrize("error", [ConfigError("of the grammar"), ValueError("of the grammar")])
def test_what_fails_in_the_thread_that_prepares_reaches_the_caller(
    generator: Generator, error: Exception
) -> None:
    slow = Slow(error)
    slow.is_released.set()

    async def main() -> str:
        async with AsyncGenerator(generator) as engine:
            with pytest.raises(type(error), match="of the grammar"):
                await engine.generate(request(0, filters=[slow]))
            with pytest.raises(ContextOverflow, match="shorten the prompt"):
                await engine.generate(request(0, prompt="word " * QUICK))
            return await engine.generate(request(1))

    assert run(main())
    assert generator.failure is None
    assert is_empty(generator)


def test_a_task_cancelled_while_its_request_is_prepared_adds_no_job(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, added, add = Slow(), list[object](), generator.add

    def noted(job: Any) -> None:
        added.append(job.request.tag)
        add(job)

    monkeypatch.setattr(generator, "add", noted)

    async def main() -> str:
        async with AsyncGenerator(generator) as engine:
            late = asyncio.create_task(engine.generate(request(0, filters=[slow])))
            await slow.starts()
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late
            slow.is_released.set()
            assert await asyncio.to_thread(slow.is_started.wait, PATIENCE)
            return await engine.generate(request(1, filters=[slow]))  # in the same pool

    assert run(main())
    assert added == [1]
    assert is_empty(generator)


def test_any_thread_may_prepare_for_a_loop_and_cancel_before_adding(generator: Generator) -> None:
    async def main() -> dict[object, list[Event]]:
        found, queue = dict[object, list[Event]](), asyncio.Queue[Event]()
        loop, left = asyncio.get_running_loop(), 3
        async with AsyncGenerator(generator) as engine:
            prepare = engine.prepare
            made = [asyncio.to_thread(prepare, request(i), queue, loop) for i in range(left)]
            jobs = await asyncio.gather(*made)
            jobs[1].cancel()
            for job in jobs:
                engine.add(job)
            while left:
                event = await queue.get()
                found.setdefault(event.tag, []).append(event)
                left -= event.reason is not None
        return found

    found = run(main())

    assert [event.reason for event in found[1]] == ["cancelled"]
    for i in (0, 2):
        assert "".join(event.text for event in found[i]) == text_of(generator, request(i))


def test_closing_waits_for_no_filter_and_refuses_its_request(generator: Generator) -> None:
    slow = Slow()

    async def main() -> None:
        engine = AsyncGenerator(generator)
        late = asyncio.create_task(engine.generate(request(0, filters=[slow])))
        await slow.starts()
        await engine.close()
        slow.is_released.set()
        with pytest.raises(ConfigError, match="the generator is closed"):
            await late
        with pytest.raises(ConfigError, match="the generator is closed"):
            await engine.generate(request(0, filters=[slow]))

    run(main())
    assert is_empty(generator)


def test_each_loop_gets_the_events_of_a_step_in_one_call(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, counts, step, events = Counter[object](), list[int](), generator.step, list[Event]()

    def counted() -> list[Event]:
        found = step()
        counts.extend(calls.values())  # of the steps before
        calls.clear()
        return found

    monkeypatch.setattr(generator, "step", counted)

    async def main(engine: AsyncGenerator, requests: list[Request]) -> None:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def noted(*given: Any, **more: Any) -> Any:
            if threading.current_thread() is engine._thread:
                calls[loop] += 1
            return call(*given, **more)

        monkeypatch.setattr(loop, "call_soon_threadsafe", noted)
        queue, left = asyncio.Queue[Event](), len(requests)
        with engine._wake:  # so that all of them begin in one step
            for one in requests:
                engine.submit(one, queue)
        while left:
            events.append(await queue.get())
            left -= events[-1].reason is not None

    async def both() -> None:
        async with AsyncGenerator(generator) as engine:
            there = asyncio.to_thread(lambda: asyncio.run(main(engine, [request(0), request(1)])))
            await asyncio.gather(there, main(engine, [request(2), request(3)]))

    run(both())

    assert max(counts) == 1
    assert len(events) > sum(counts)
    texts = {i: "".join(event.text for event in events if event.tag == i) for i in range(4)}
    assert texts == {i: text_of(generator, request(i)) for i in range(4)}


def test_a_full_queue_loses_its_own_events_only(generator: Generator) -> None:
    lost = list[object]()

    async def main() -> str:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: lost.append(context["exception"]))
        async with AsyncGenerator(generator) as engine:
            engine.submit(request(0), asyncio.Queue[Event](maxsize=1))
            return await engine.generate(request(1))

    assert run(main()) == text_of(generator, request(1))
    assert {type(error) for error in lost} == {asyncio.QueueFull}
