"""Models that replace each other: who waits, what is freed, what a failure ends."""

import asyncio
import gc
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import pytest
from adapters import make_adapter
from hosts import make_host, reason_of, text_of
from serving import Served, serving
from tiny import make_tiny

from exl2flow.core.errors import InferenceError
from exl2flow.inference import load_model
from exl2flow.model import Tokenizer
from exl2flow.serve.errors import ApiError
from exl2flow.serve.hosts.model_host import ModelHost
from exl2flow.serve.hosts.models import Models

T = TypeVar("T")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, one that is broken, and one behind a link that leads out of it."""
    inside, outside = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("elsewhere")
    for seed, name in enumerate(("a", "b")):
        make_tiny("llama", inside / name, seed=seed, max_position_embeddings=8192)
    shutil.copytree(inside / "b", inside / "broken")
    (inside / "broken" / "model.safetensors").unlink()
    (inside / "linked").symlink_to(make_tiny("llama", outside / "c"))
    return inside


class Loader:
    """Makes hosts as the command does, and counts them."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.made = list[str]()
        self._folder, self._options = folder, {"models": folder, "swap": True, **options}

    def __call__(self, folder: Path) -> ModelHost:
        self.made.append(folder.name)
        host = make_host(load_model(folder, device="cpu"), **self._options)
        host.start()
        return host

    def models(self) -> Models:
        return Models(self(self._folder / "a"), self)


def ended(work: Coroutine[Any, Any, T], seconds: float = 300) -> T:
    """Run something that ends soon."""

    async def run() -> T:
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(run())


async def until(condition: Callable[[], object], *, pause: float = 0.0) -> None:
    """Wait until a condition holds, which is checked in every turn of the event loop or less."""
    while not condition():
        await asyncio.sleep(pause)


async def name_of(models: Models, name: str) -> str:
    """Return the model that answers for a name."""
    async with models.using(name) as host:
        return host.name


def test_requests_of_the_next_model_go_together(folder: Path) -> None:
    loader = Loader(folder)
    models, order = loader.models(), list[str]()

    async def ask(name: str) -> None:
        async with models.using(name) as host:
            order.append(host.name)
            await asyncio.sleep(0)

    async def run() -> None:
        async with AsyncExitStack() as held:
            await held.enter_async_context(models.using("a"))
            asked = [asyncio.create_task(ask("b"))]
            await until(lambda: models.state == "loading")
            asked += [asyncio.create_task(ask(name)) for name in ("a", "b", "a", "b")]
            await asyncio.sleep(0)  # each asks
            assert (models.state, order) == ("loading", [])
        await asyncio.gather(*asked)
        await models.close()

    ended(run())
    assert order == ["b", "b", "b", "a", "a"]
    assert loader.made == ["a", "b", "a"]


def test_a_client_that_leaves_does_not_stop_a_load(folder: Path) -> None:
    loader = Loader(folder)
    models = loader.models()

    async def run() -> str:
        asked = asyncio.create_task(name_of(models, "b"))
        await until(lambda: models.state == "loading")
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        name = await name_of(models, "b")
        await models.close()
        return name

    assert ended(run()) == "b"
    assert loader.made == ["a", "b"]


def test_a_model_that_cannot_be_loaded_gives_way_to_the_one_before(folder: Path) -> None:
    loader = Loader(folder)
    models = loader.models()

    async def run() -> list[str]:
        other = asyncio.create_task(name_of(models, "a"))
        for _ in range(2):
            with pytest.raises(ApiError, match=r"'broken' cannot be loaded: .*safetensors") as told:
                await name_of(models, "broken")
            assert told.value.status == 503
        names = [await other, await name_of(models, "a")]
        with pytest.raises(ApiError, match="'broken'"):
            await models.load("broken")  # an admin's request tries again
        await models.close()
        return names

    assert ended(run()) == ["a", "a"]
    assert loader.made == ["a", "broken", "a", "broken", "a"]


def test_a_text_has_some_time_to_end(folder: Path) -> None:
    models = Loader(folder, swap_wait=0.1).models()

    async def text() -> str | None:
        async with models.using("a") as host:
            return await reason_of(host, text_of(8000, end_loops=False))

    async def run() -> tuple[str | None, float]:
        running = asyncio.create_task(text())
        await until(lambda: models.host is not None and models.host.answers, pause=0.01)
        began = time.monotonic()
        assert await name_of(models, "b") == "b"
        waited = time.monotonic() - began
        await models.close()
        return await running, waited

    reason, waited = ended(run())
    assert reason == "cancelled"
    assert waited >= 0.1


def test_an_idle_model_is_freed_and_comes_back(folder: Path) -> None:
    loader = Loader(folder, unload_after=60)
    models = loader.models()

    async def run() -> str:
        models.tick()
        assert models.state == "ready"
        models.renew(models.options.model_copy(update={"unload_after": 1e-6}))
        async with models.using():
            await asyncio.sleep(0.001)
            models.tick()
            assert models.state == "ready"
        await asyncio.sleep(0.001)
        models.tick()
        await until(lambda: models.state == "idle", pause=0.01)
        name = await name_of(models, "")
        await models.close()
        return name

    assert ended(run()) == "a"
    assert loader.made == ["a", "a"]


@pytest.mark.parametrize("turns", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_swaps_leave_nothing_behind(folder: Path, turns: int) -> None:
    """Clients ask for two models and leave: hosts, threads and descriptors are given back."""
    models, seen = Loader(folder, swap_wait=0.0).models(), list[weakref.ref[ModelHost]]()

    async def ask(name: str) -> None:
        async with models.using(name) as host:
            if not any(ref() is host for ref in seen):
                seen.append(weakref.ref(host))
            with suppress(ApiError):  # the other model is to be loaded
                await reason_of(host, text_of(8))

    async def run() -> list[tuple[int, int]]:
        counts = list[tuple[int, int]]()
        for turn in range(turns):
            asked = [asyncio.create_task(ask("ab"[(turn + i) % 2])) for i in range(4)]
            asked[turn % 4].cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            gc.collect()
            counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
        await models.close()
        return counts

    counts = ended(run(), 300.0 + 5.0 * turns)
    assert len(seen) >= turns
    gc.collect()
    assert not [ref for ref in seen if ref() is not None]
    (threads, files), (more_threads, more_files) = (
        [max(column) for column in zip(*part, strict=True)] for part in (counts[:4], counts[4:])
    )
    assert more_threads <= threads + 2  # pools start theirs when they are needed
    assert more_files <= files


def test_a_freed_model_leaves_no_vocabulary(folder: Path) -> None:
    """What grammars keep of a tokenizer goes with its model."""
    models = Loader(folder, tool_grammar="on").models()

    async def run() -> weakref.ref[Tokenizer]:
        async with models.using("a") as host:
            seen = weakref.ref(host.tokenizer)
        await models.load("b")
        await models.close()
        return seen

    seen = ended(run())
    gc.collect()
    assert seen() is None


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    loras = tmp_path_factory.mktemp("loras")
    make_adapter(loras / "french", folder / "a")
    flags = ("--models", str(folder), "--swap", "--loras", str(loras), "--strict-names")
    with serving(*flags, model=folder / "a") as server:
        yield server


def asked(client: httpx.Client, model: str) -> httpx.Response:
    """Ask a model."""
    return client.post("/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 4})


def test_models_are_loaded_by_name(served: Served) -> None:
    with served.http() as client:
        assert [row["id"] for row in client.get("/v1/models").json()["data"]] == [
            "a",
            "b",
            "broken",
        ]
        assert [asked(client, name).json()["model"] for name in ("a", "b", "b", "a")] == [*"abba"]
        for name in ("linked", "../a", "c"):
            assert asked(client, name).status_code == 404
        broken = asked(client, "broken")
        assert broken.status_code == 503
        assert "'broken' cannot be loaded" in broken.json()["error"]["message"]
        assert asked(client, "a").status_code == 200
        assert 'model_name="a"' in client.get("/metrics").text
    assert sum("loaded b in" in line for line in served.lines) == 1


def test_an_admin_loads_and_unloads(served: Served) -> None:
    with served.http() as client:
        loaded = client.post("/v1/model/load", json={"model_name": "b"})
        assert (loaded.json()["id"], served.status()["model"]) == ("b", "b")
        assert client.post("/v1/model/load", json={"name": "nothing"}).status_code == 404
        assert client.post("/v1/model/unload", json={}).json()["state"] == "unloaded"
        assert client.get("/health").status_code == 503
        refused = asked(client, "b")
        assert refused.status_code == 503
        assert "/v1/model/load" in refused.json()["error"]["message"]
        assert [row["id"] for row in client.get("/v1/models").json()["data"]] == [
            "b",
            "a",
            "broken",
        ]
        assert served.status()["state"] == "unloaded"
        assert client.post("/v1/model/load", json={"name": "a"}).status_code == 200
        assert asked(client, "a").status_code == 200


def test_adapters_are_loaded_by_name(served: Served) -> None:
    body = {"model": "a", "prompt": "x", "max_tokens": 8, "temperature": 0}
    with served.http() as client:
        plain = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        place = {"lora_name": "fr", "lora_path": "french"}
        assert client.post("/v1/load_lora_adapter", json=place).json() == {"adapters": ["fr"]}
        assert client.post("/v1/load_lora_adapter", json=place).status_code == 400
        assert "a:fr" in [row["id"] for row in client.get("/v1/models").json()["data"]]
        adapted, half = (
            client.post("/v1/completions", json=body | more).json()["choices"][0]["text"]
            for more in ({"model": "a:fr"}, {"lora": [{"name": "fr", "scale": 0.5}]})
        )
        again = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert len({plain, adapted, half}) == 3
        assert again == plain
        outside = {"lora_name": "x", "lora_path": "../models/a"}
        assert client.post("/v1/load_lora_adapter", json=outside).status_code == 404
        gone = {"lora_name": "fr"}
        assert client.post("/v1/unload_lora_adapter", json=gone).json() == {"adapters": []}
        assert client.post("/v1/unload_lora_adapter", json=gone).status_code == 404
        assert asked(client, "a:fr").status_code == 404


def test_a_model_that_lost_a_process_is_loaded_again(folder: Path) -> None:
    loader = Loader(folder)
    models = loader.models()
    host = models.host
    assert host is not None
    assert host.generator is not None
    host.model = replace(host.model, team=SimpleNamespace(failure=InferenceError("it is gone")))
    host.generator.fail(InferenceError("as a step does"))

    async def run() -> None:
        models.tick()
        assert models.state == "loading"
        assert await name_of(models, "") == "a"
        await models.close()

    ended(run())
    assert loader.made == ["a", "a"]


@pytest.mark.parametrize("adapter", [False, True])
def test_models_with_names_of_the_hub_replace_each_other(folder: Path, adapter: bool) -> None:
    names = {folder / "a": "org/tiny:4.0", folder / "b": "org/tiny:6.0"}

    def make(path: Path) -> ModelHost:
        host = make_host(load_model(path, device="cpu"), name=names[path], swap=True)
        host.start()
        return host

    async def used() -> list[str]:
        models = Models(make(folder / "a"), make, {"org/tiny:6.0": folder / "b"})
        assert models.names == ["org/tiny:4.0", "org/tiny:6.0"]
        found = list[str]()
        for name in ("org/tiny:6.0", "4.0", "org/tiny:4.0"):
            async with models.using(name + ":adapter" * adapter) as host:
                found.append(host.name)
        await models.close()
        return found

    # a number alone is no name, and answered by the model that is loaded
    assert asyncio.run(used()) == ["org/tiny:6.0", "org/tiny:6.0", "org/tiny:4.0"]
