"""The life of a host: failures that nobody sees, what is freed, what closing ends."""

import asyncio
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from hosts import make_host, models_of, reason_of, text_of

from exl2flow.core.errors import ConfigError, OutOfDeviceMemory
from exl2flow.inference import Adapter, Generator, LoadedModel
from exl2flow.serve.answers.fields import Lora
from exl2flow.serve.errors import ApiError
from exl2flow.serve.hosts import model_host as module
from exl2flow.serve.hosts.metrics import Metrics
from exl2flow.serve.hosts.model_host import ModelHost
from exl2flow.serve.hosts.models import Models

LONG, SHORT = text_of(200), text_of(4)
THREADS = {"exl2flow-generator"}


def started(model: LoadedModel, make: Callable[[], Generator] | None = None) -> ModelHost:
    host = make_host(model, make)
    host.start()
    return host


def generator_of(host: ModelHost) -> Generator:
    assert host.generator is not None
    return host.generator


def break_device(generator: Generator) -> None:
    """Let steps fail from now on, with an error that a client could have caused as well."""

    def fail(*_: Any) -> None:
        raise ConfigError("`prompt` is broken")

    generator._device_slots.forward = fail  # type: ignore[method-assign, assignment]


async def fail(host: ModelHost) -> None:
    """Let the generator fail after its last client has left."""
    answer = await host.begin(lambda: LONG)
    async for _ in answer.updates():
        break
    failed = generator_of(host)
    break_device(failed)
    host.answers.pop(answer)  # a client that leaves without a look at the generator
    while failed.failure is None:
        await asyncio.sleep(0)


async def recovered(host: ModelHost) -> None:
    assert host._recovery is not None
    await host._recovery


@pytest.mark.parametrize("seen_by", ["begin", "tick", "state"])
def test_a_failure_without_clients_is_seen(model: LoadedModel, seen_by: str) -> None:
    host = started(model)
    models = models_of(host)

    async def run() -> str | None:
        await fail(host)
        match seen_by:
            case "begin":
                with pytest.raises(ApiError) as told:
                    await host.begin(lambda: LONG)
                assert told.value.status == 503
            case "tick":
                models.tick()
            case _:
                assert models.state == "recovering"
        assert host.state == "recovering"
        await recovered(host)
        reason = await reason_of(host, SHORT)
        await host.close()
        return reason

    assert asyncio.run(run()) == "max_new_tokens"


@pytest.mark.parametrize("is_anew", [False, True])
def test_what_a_failing_generator_refuses_is_no_fault_of_the_client(
    model: LoadedModel, is_anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails, and may be made anew, while a request is being prepared for it."""
    host = started(model)
    loop = asyncio.new_event_loop()

    async def fails() -> None:
        generator_of(host).fail(RuntimeError("the device is gone"))
        host.look()
        if is_anew:
            await recovered(host)

    def prepare(*_: Any) -> None:
        asyncio.run_coroutine_threadsafe(fails(), loop).result(30)
        raise ConfigError("`prompt` is refused")

    async def run() -> int:
        assert host._running is not None
        monkeypatch.setattr(host._running.thread, "prepare", prepare)
        with pytest.raises(ApiError) as told:
            await host.begin(lambda: LONG)
        await host.close()
        return told.value.status

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(run()) == 503


def test_the_cache_is_free_before_another_is_reserved(model: LoadedModel) -> None:
    caches, alive = list[weakref.ref[Any]](), list[int]()

    def make() -> Generator:
        alive.append(sum(one() is not None for one in caches))
        made = Generator(model, slots=2)
        caches.append(weakref.ref(made._device_slots.cache))
        return made

    async def run() -> None:
        host = started(model, make)
        slow, quick = [await host.begin(lambda: LONG) for _ in range(2)]
        break_device(generator_of(host))
        with pytest.raises(ConfigError):
            [_ async for _ in quick.updates()]
        host.end(quick)
        await recovered(host)
        assert host.state == "ready"
        host.end(slow)  # its client has read nothing
        await host.close()

    asyncio.run(run())
    assert alive == [0, 0]


def test_a_generator_that_is_made_anew_is_warm(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, warmup = list[Generator](), Generator.warmup

    def warmed(self: Generator) -> None:
        warm.append(self)
        warmup(self)

    monkeypatch.setattr(Generator, "warmup", warmed)

    async def run() -> None:
        host = started(model)
        await fail(host)
        host.look()
        await recovered(host)
        assert warm[1:] == [generator_of(host)]
        await host.close()

    asyncio.run(run())


@pytest.mark.parametrize("close", ["host", "unload", "models"])
def test_closing_ends_what_a_recovery_makes(model: LoadedModel, close: str) -> None:
    is_made, may_go_on, made = threading.Event(), threading.Event(), list[Generator]()

    def make() -> Generator:
        if made:
            is_made.set()
            may_go_on.wait(30)
        made.append(Generator(model, slots=2))
        return made[-1]

    async def run() -> ModelHost:
        host = started(model, make)
        models = Models(host, lambda _: started(model))
        await fail(host)
        host.look()
        await asyncio.to_thread(is_made.wait, 30)
        ways = {"host": host.close, "unload": models.unload, "models": models.close}
        closing = asyncio.ensure_future(ways[close]())
        await asyncio.sleep(0)
        assert not closing.done()
        may_go_on.set()
        await closing
        return host

    before = generators()
    host = asyncio.run(run())
    assert host.state == "draining"
    assert generators() == before
    assert host.generator is None


def generators() -> int:
    """Return how many threads run generators."""
    return sum(one.name in THREADS for one in threading.enumerate())


def test_nothing_is_made_for_a_host_that_closes(model: LoadedModel) -> None:
    made = list[Generator]()

    def make() -> Generator:
        made.append(Generator(model, slots=2))
        return made[-1]

    async def run() -> None:
        host = started(model, make)
        await fail(host)
        host.look()
        await host.close()

    asyncio.run(run())
    assert len(made) == 1


def test_a_host_whose_generator_cannot_be_made_again_has_failed(model: LoadedModel) -> None:
    made = list[Generator]()

    def make() -> Generator:
        if made:
            raise OutOfDeviceMemory("too little")
        made.append(Generator(model, slots=2))
        return made[-1]

    async def run() -> None:
        host = started(model, make)
        await fail(host)
        host.look()
        await recovered(host)
        assert Metrics(models_of(host)).status()["state"] == "failed"
        with pytest.raises(ApiError, match="the server is failed"):
            await host.begin(lambda: SHORT)
        await host.close()

    asyncio.run(run())


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_a_failure_counts_for_an_hour(
    model: LoadedModel, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SOUND_SECONDS", seconds)

    async def run() -> str:
        host = started(model)
        for _ in range(2):
            await fail(host)
            host.look()
            await recovered(host)
        state = host.state
        await host.close()
        return state

    assert asyncio.run(run()) == ("failed" if seconds else "ready")


def test_an_admin_loads_a_model_anew_that_failed_for_good(model: LoadedModel) -> None:
    async def run() -> str:
        host = started(model)
        models = Models(host, lambda _: started(model))
        host.state = "failed"
        await models.load(host.name)
        state = models.state
        assert models.host is not host
        await models.close()
        return state

    assert asyncio.run(run()) == "ready"


def test_a_host_is_closed_whole_though_its_generator_is_not(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host, ended = started(model), list[str]()

    def refuse() -> None:
        raise MemoryError("too little")

    async def run() -> None:
        monkeypatch.setattr(generator_of(host), "close", refuse)
        monkeypatch.setattr(host.trial, "close", lambda: ended.append("trial"))
        models = Models(host, lambda _: started(model))
        await models.unload()
        assert models.host is None

    asyncio.run(run())
    assert host._pool._shutdown
    assert ended == ["trial"]
    assert "was not closed cleanly" in caplog.text
    assert "too little" in caplog.text


def test_a_scaled_adapter_is_of_the_files_that_were_loaded(
    model: LoadedModel, tmp_path: Path
) -> None:
    source, half = model.spec.source_dir, [Lora(name="b", scale=0.5)]
    host = started(model)
    make_adapter(tmp_path / "a", source, seed=1)
    host.load_adapter("a", tmp_path / "a", 1.0)
    [before] = host.adapters_for("x", [Lora(name="a", scale=0.5)])
    make_adapter(tmp_path / "a", source, seed=2)
    [same] = host.adapters_for("x", [Lora(name="a", scale=0.5)])
    host.load_adapter("b", tmp_path / "a", 1.0)
    [after] = host.adapters_for("x", half)
    asyncio.run(host.close())

    assert same is before
    assert after == Adapter.load(tmp_path / "a", model, scaling=0.5)
    assert after != before


def test_a_scale_that_overflows_is_refused(model: LoadedModel, tmp_path: Path) -> None:
    adapter = Adapter.load(make_adapter(tmp_path, model.spec.source_dir), model)

    with pytest.raises(ConfigError, match=r"the scale 1e\+39 is too large"):
        adapter.scaled(1e39)
