"""`AsyncGenerator`: many loops and threads at one generator, and the ways out."""

import asyncio

import pytest
from small_pages import is_empty

from exl2flow.core.errors import ConfigError, InferenceError
from exl2flow.core.requests.request import Sampled
from exl2flow.inference import (
    AsyncGenerator,
    Event,
    Generator,
    LoadedModel,
    Request,
    SamplingSettings,
)

GREEDY = SamplingSettings.greedy()


def request(i: int, *, tokens: int = 12, **more: object) -> Request:
    return Request((5, 6, 7 + i), max_new_tokens=tokens, settings=GREEDY, stops=(), tag=i, **more)


def test_texts_of_one_loop_are_those_of_a_plain_generator(generator: Generator) -> None:
    expected = [
        generator.generate([r.prompt], max_new_tokens=12, settings=GREEDY, stops=())
        for r in map(request, range(9))
    ]

    async def run() -> list[str]:
        async with AsyncGenerator(generator) as engine:
            return await asyncio.gather(*(engine.generate(request(i)) for i in range(9)))

    assert [[text] for text in asyncio.run(run())] == expected
    assert is_empty(generator)


def test_an_iteration_that_is_given_up_frees_its_pages(generator: Generator) -> None:
    async def run() -> None:
        async with AsyncGenerator(generator) as engine:
            events = engine.stream(request(1, tokens=400))
            async for event in events:
                if event.ids:
                    break
            await events.aclose()
            while not is_empty(generator):
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_cancelled_task_ends_its_job_only(generator: Generator) -> None:
    async def run() -> str:
        async with AsyncGenerator(generator) as engine:
            long = asyncio.create_task(engine.generate(request(1, tokens=400)))
            other = asyncio.create_task(engine.generate(request(2)))
            await asyncio.sleep(0.05)
            long.cancel()
            with pytest.raises(asyncio.CancelledError):
                await long
            return await other

    assert asyncio.run(run())
    assert is_empty(generator)


def test_an_error_reaches_the_one_who_asked(generator: Generator) -> None:
    def fails(sampled: Sampled) -> None:
        raise ValueError("of the hook")

    async def run() -> str:
        async with AsyncGenerator(generator) as engine:
            with pytest.raises(ValueError, match="of the hook"):
                await engine.generate(request(1, hooks=(fails,)))
            with pytest.raises(InferenceError, match="no tokens"):
                await engine.generate(Request(()))
            return await engine.generate(request(2))

    assert asyncio.run(run())


def test_a_request_is_in_the_queue_at_once(generator: Generator) -> None:
    async def run() -> tuple[str, str]:
        async with AsyncGenerator(generator) as engine:
            events = asyncio.Queue[Event]()
            job = engine.submit(request(1), events)
            assert not generator.is_idle or job.is_done
            text = ""
            while (event := await events.get()).reason is None:
                text += event.text
            return text + event.text, await engine.generate(request(1))

    submitted, streamed = asyncio.run(run())

    assert submitted == streamed
    assert is_empty(generator)


def test_closing_ends_running_jobs_and_refuses_more(generator: Generator) -> None:
    async def run() -> str:
        engine = AsyncGenerator(generator)
        running = asyncio.create_task(engine.generate(request(1, tokens=400)))
        await asyncio.sleep(0.05)
        await engine.close()
        text = await running
        with pytest.raises(ConfigError, match="closed"):
            await engine.generate(request(2))
        return text

    asyncio.run(run())
    assert is_empty(generator)


def test_a_failure_of_the_device_reaches_all(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = generator._device_slots.forward

    def broken(*step: object) -> object:
        if len(generator._scheduler.running) < 3:
            return decode(*step)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async def run() -> list[object]:
        async with AsyncGenerator(generator) as engine:
            tasks = [engine.generate(request(i, tokens=400)) for i in range(3)]
            monkeypatch.setattr(generator._device_slots, "forward", broken)
            return await asyncio.gather(*tasks, return_exceptions=True)

    assert [str(error)[:10] for error in asyncio.run(run())] == ["CUDA error"] * 3
    with pytest.raises(InferenceError, match="make a new one"):
        generator.submit(request(1))
    assert is_empty(generator)


@pytest.mark.parametrize("place", ["check_stream", "leave"])
def test_an_error_that_no_job_reports_reaches_every_stream_and_later_ones(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The CUDA stream is checked before a step; slots are left when the generator closes."""
    generator = Generator(model, tokens=4096, slots=2)

    def refuses(*given: object) -> None:
        raise ConfigError("the model is in use on another CUDA stream")

    async def run() -> tuple[list[object], bool]:
        async with AsyncGenerator(generator) as engine:
            tasks = [asyncio.create_task(engine.generate(request(i, tokens=400))) for i in range(3)]
            await asyncio.sleep(0.05)
            monkeypatch.setattr(generator._device_slots, place, refuses)
            if place == "leave":
                await engine.close()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            if place != "leave":
                with pytest.raises(InferenceError, match="another CUDA stream"):
                    await engine.generate(request(4))
            return found, engine._thread.is_alive()

    found, is_alive = asyncio.run(asyncio.wait_for(run(), 20))

    assert [type(error) for error in found] == [ConfigError] * 3
    assert is_alive == (place != "leave")
    assert generator.failure in found
    assert is_empty(generator)


def test_a_failure_without_jobs_is_logged_and_refuses_later_requests(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generator = Generator(model, tokens=2048, slots=1)
    end = generator._end_cancelled

    def fails_behind() -> None:
        end()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async def run() -> None:
        async with AsyncGenerator(generator) as engine:
            job = engine.submit(request(1, tokens=400), events := asyncio.Queue[Event]())
            await events.get()
            monkeypatch.setattr(generator, "_end_cancelled", fails_behind)
            job.cancel()
            while (await events.get()).reason is None:
                pass
            while generator.failure is None:
                await asyncio.sleep(0.01)
            with pytest.raises(InferenceError, match="illegal memory access"):
                await engine.generate(request(2))

    asyncio.run(asyncio.wait_for(run(), 20))

    assert "the generator failed when it had no job" in caplog.text


def test_a_loop_that_closes_as_an_event_comes_ends_no_other_stream(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generator = Generator(model, tokens=2048, slots=2)

    async def gone(engine: AsyncGenerator) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "is_closed", lambda: False)  # it closes right behind the check
        engine.submit(request(1, tokens=40), asyncio.Queue())
        return loop

    async def run() -> str:
        async with AsyncGenerator(generator) as engine:
            await asyncio.to_thread(lambda: asyncio.run(gone(engine)))
            return await engine.generate(request(2))

    assert asyncio.run(asyncio.wait_for(run(), 20))
    assert generator.failure is None
    assert not caplog.records


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, BaseException])
def test_what_is_no_exception_ends_texts_and_refuses_new_ones_without_another_step(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    made, steps = Generator(model, tokens=1024, slots=1), list[None]()
    step = made.step

    def counted() -> list[Event]:
        steps.append(None)
        return step()

    def fails(*step: object) -> None:
        raise error("of a step")

    monkeypatch.setattr(made._device_slots, "forward", fails)
    monkeypatch.setattr(made, "step", counted)

    async def run() -> list[BaseException | str]:
        async with AsyncGenerator(made) as engine:
            both = [await asyncio.gather(engine.generate(request(0)), return_exceptions=True)]
            count = len(steps)
            both.append(await asyncio.gather(engine.generate(request(1)), return_exceptions=True))
            await asyncio.sleep(0.05)
            assert len(steps) == count  # the thread waits
            return [one for found in both for one in found]

    first, second = asyncio.run(run())

    assert isinstance(first, InferenceError)
    assert f"`{error.__name__}`: of a step" in str(first)
    assert isinstance(second, InferenceError)
    assert "the generator has failed" in str(second)
