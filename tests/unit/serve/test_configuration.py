"""Options of a file and of the environment, their change meanwhile, and the service manager."""

import asyncio
import os
import signal
import socket
import stat
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from adapters import make_adapter
from hosts import make_host, models_of
from servers import wait_for
from serving import DEMO, Served, serving
from tiny import make_tiny

from exl2flow.cli.main import app
from exl2flow.cli.options.layers import as_toml, layered
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.serving import ServeOptions
from exl2flow.inference import Adapter, Event, load_model
from exl2flow.serve.answers.fields import CompletionBody
from exl2flow.serve.apis.completions import plan_of
from exl2flow.serve.apis.mapping import settings_of
from exl2flow.serve.apis.sections import checked
from exl2flow.serve.hosts.model_host import ModelHost
from exl2flow.serve.hosts.reloading import Configuration
from exl2flow.serve.http.listening import listening
from exl2flow.serve.http.running import _Server

PREFIX = "EXL2FLOW_SERVE_"


def read(path: Path | None, **flags: object) -> ServeOptions:
    given = layered(ServeOptions, flags, path=path, prefix=PREFIX, of="`exl2flow serve`")
    return checked(given, path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.toml"


def test_flags_come_before_the_environment_the_file_and_defaults(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('slots = 2\nwaiting = 2\nport = 2\nallow-host = ["a", "b"]\ncache = "q6"')
    for name, value in {"SLOTS": "3", "WAITING": "3", "STRICT": "true", "CACHE": ""}.items():
        monkeypatch.setenv(PREFIX + name, value)
    monkeypatch.setenv(f"{PREFIX}ORIGIN", "http://a,http://b")

    found = read(file, slots=4)

    assert (found.slots, found.waiting, found.port, found.drain) == (4, 3, 2, 30.0)
    assert (found.strict, found.cache) == (True, "q6")
    assert (found.allow_host, found.origin) == (["a", "b"], ["http://a", "http://b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slot = 3", "`slot`, which is not an option of `exl2flow serve`; near are `slots`"),
        ("print_config = true", "`print_config`, which is not an option"),
        ("slots = 'many'", "`slots` in `{file}` is many: input should be a valid integer"),
        ("allow_host = 'a'", "`allow_host` in `{file}` is a: input should be a valid list"),
        ("defaults = 3", "`defaults` in `{file}` is 3"),
        ("[slots]\na = 1", "`slots` in `{file}` is"),
        ("[slots", "cannot read the configuration in `{file}`"),
        ("[defaults]\ntemprature = 1", "[defaults] in `{file}` has `temprature`, which is no"),
        ("[defaults]\nmax_tokens = 1", "[defaults] in `{file}` has `max_tokens`, which is no"),
        ("[defaults]\ntop_k = 'a'", "[defaults] in `{file}`: `top_k`: Input should be a valid int"),
        ("[forced]\ntop_p = 2", "[forced] in `{file}`: `top_p` is 2"),
        ("[forced]\nmirostat = 1", "[forced] in `{file}`: `mirostat` is 1"),
        ("[aliases]\na = 3", "`aliases.a` in `{file}` is 3"),
        ("model = 'm'\n[aliases]\na = 'n'", "[aliases] in `{file}` has `a` for `n`, which is no"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_key(file: Path, text: str, message: str) -> None:
    file.write_text(text)

    with pytest.raises(ConfigError) as caught:
        read(file)

    assert message.format(file=file) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SLOT", "", f"`{PREFIX}SLOT` is not an option of `exl2flow serve`; near are `slots`"),
        ("DEFAULTS", "1", f"`{PREFIX}DEFAULTS` is not an option"),
        ("SLOTS", "many", f"`{PREFIX}SLOTS` is many: input should be a valid integer"),
    ],
)
def test_a_wrong_variable_is_named(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX + name, value)

    with pytest.raises(ConfigError) as caught:
        read(None)

    assert message in str(caught.value)


def test_the_configuration_that_is_printed_can_be_given_back(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXL2FLOW_API_KEY", "a-secret")
    file.write_text(
        'model = "ä\\u007f\\"\\\\"\ncache_ram = "1GB"\ndrain = inf\nlora = ["a"]\n'
        "[defaults]\ntypical_p = 1e-7\nmirostat = 2\n[forced]\ntop_k = -1\n"
        '[aliases]\n"a b" = "ä\\u007f\\"\\\\:a"'
    )
    monkeypatch.setattr(sys, "argv", ["exl2flow", "serve", "--config", str(file), "--print-config"])
    with pytest.raises(SystemExit) as ended:
        app()
    printed = capsys.readouterr().out
    before = read(file)
    file.write_text(printed)

    assert ended.value.code == 0
    assert read(file) == before
    assert before.defaults == {"typical": 1e-7, "mirostat": True}
    assert "a-secret" not in printed
    assert tomllib.loads(printed).keys() >= {"slots", "waiting", "cache_ram", "aliases"}
    assert as_toml(ServeOptions()).count("[") == 4  # empty lists, but no tables


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ModelHost:
    folder = make_tiny("llama", tmp_path_factory.mktemp("tiny"))
    model = load_model(folder, device="cpu")
    return make_host(
        model,
        defaults={"top_p": 0.5, "min_p": 0.5, "top_k": 5, "tfs": 0.5},
        adapters=tuple(
            Adapter.load(make_adapter(folder / name, folder, seed=seed), model)
            for seed, name in enumerate(("one", "two"))
        ),
    )


def test_forced_settings_come_before_the_request_the_defaults_and_the_model(
    host: ModelHost, file: Path
) -> None:
    file.write_text("[forced]\ntop_p = 0.6\n[defaults]\ntop_p = 0.7\nmin_p = 0.7\ntop_k = -1")
    host.options = read(file)
    body = CompletionBody(prompt="a", top_p=0.8, min_p=0.8, temperature=0.8)

    found = settings_of(body, host)

    assert (found.top_p, found.min_p, found.temperature) == (0.6, 0.8, 0.8)
    assert (found.top_k, found.tfs) == (0, 0.5)
    assert settings_of(CompletionBody(prompt="a"), host).min_p == 0.7
    assert settings_of(CompletionBody(prompt="a"), host).temperature == 1.0


def test_a_forced_temperature_leaves_no_dynamic_one(host: ModelHost, file: Path) -> None:
    file.write_text("[forced]\ntemperature = 0.3")
    host.options = read(file)

    for more in ({"dynatemp_range": 0.2}, {"min_temp": 0.5, "max_temp": 2.0}):
        found = settings_of(CompletionBody(prompt="a", **more), host)
        assert (found.temperature, found.min_temp, found.max_temp) == (0.3, 0.0, 0.0)


def test_an_alias_stands_for_an_adapter(host: ModelHost, file: Path) -> None:
    folder, (one, two) = host.model.spec.source_dir, host.adapters.values()
    file.write_text(f'[aliases]\nb = "{folder.name}:two"\nall = "{folder.name}"')
    host.options = read(file, model=folder, lora=[one.folder, two.folder])

    assert host.adapters_for("b", None) == (two,)
    assert host.adapters_for("all", None) == host.adapters_for("x", None) == (one, two)
    assert models_of(host).names[-2:] == ["b", "all"]


def test_no_sign_of_life_is_given_while_a_step_hangs(
    host: ModelHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test with this host."""
    step, goes_on = host.generator.step, threading.Event()

    def hang() -> list[Event]:
        goes_on.wait(30)
        return step()

    async def watched(manager: socket.socket) -> list[int]:
        server = _Server(uvicorn.Config("none"), models_of(host), None)
        counts = list[int]()

        def look() -> None:
            server._watch()
            try:
                counts.append(len(manager.recv(100, socket.MSG_DONTWAIT)))
            except BlockingIOError:
                counts.append(0)

        look()
        body = CompletionBody(prompt="a", max_tokens=1)
        answer = await host.begin(lambda: plan_of(body, host))
        for _ in range(3):
            look()
        goes_on.set()
        while host.progress is not None:
            await asyncio.sleep(0.01)
        look()
        host.end(answer)
        await host.close()
        return counts

    host.start()
    monkeypatch.setattr(host.generator, "step", hang)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "manager"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "manager"))
        alive = len("WATCHDOG=1")
        assert asyncio.run(watched(manager)) == [alive, alive, 0, 0, alive]


def test_what_is_called_at_a_change_may_refuse_it(file: Path) -> None:
    called = list[int]()

    def refuse() -> None:
        raise ConfigError("no keys")

    file.write_text("waiting = 1")
    configuration = Configuration(read(file), lambda: read(file), file)
    configuration.on_reload += [refuse, lambda: called.append(configuration.options.waiting)]
    configuration.look()
    assert called == []
    file.write_text("waiting = 22")
    configuration.look()
    assert called == [22]
    file.unlink()
    configuration.look()
    assert called == [22]
    configuration.reload()
    assert called == [22, 22]


@dataclass(frozen=True)
class Running:
    """A server at a path, its configuration, and what it tells the service manager."""

    served: Served
    file: Path
    path: Path
    manager: socket.socket

    def client(self) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(self.path))
        return httpx.Client(transport=transport, base_url="http://localhost", timeout=60)

    def message(self, begin: str) -> str:
        """Return the next message that begins so; only signs of life may come before."""
        while not (found := self.manager.recv(1000).decode()).startswith(begin):
            assert found == "WATCHDOG=1"
        return found

    def texts(self, **fields: Any) -> set[str]:
        """Return the texts of some seeds."""
        body = {"prompt": "The", "max_tokens": 8, "model": "other", **fields}
        with self.client() as client:
            given = [client.post("/v1/completions", json={**body, "seed": n}) for n in range(3)]
        return {one.json()["choices"][0]["text"] for one in given}

    def wait_for_line(self, text: str) -> None:
        wait_for(lambda: any(text in line for line in self.served.lines), pause=0.02)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("s")
    path, file = folder / "http", folder / "serve.toml"
    with socket.socket(socket.AF_UNIX) as stale, socket.socket(socket.AF_UNIX) as _:
        stale.bind(str(path))
    file.write_text(f"host = 'unix:{path}'\nslots = 4\n[defaults]\ntemperature = 0")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(folder / "manager"))
        manager.settimeout(30)
        env = {"NOTIFY_SOCKET": str(folder / "manager")}
        with serving("--config", str(file), "--tool-grammar", "off", env=env) as served:
            yield Running(served, file, path, manager)


def test_a_path_is_served_to_its_user_only(running: Running) -> None:
    assert running.served.url == f"unix:{running.path}"
    assert stat.S_IMODE(running.path.stat().st_mode) == 0o600
    assert running.message("READY=1") == f"READY=1\nSTATUS=serving {DEMO.name}"
    with running.client() as client:
        assert client.get("/health").status_code == 200
    with pytest.raises(ConfigError, match="in use"), listening(f"unix:{running.path}", 0):
        pass
    assert running.path.exists()


def test_sighup_and_a_changed_file_change_what_only_requests_read(running: Running) -> None:
    assert len(running.texts()) == 1
    assert len(running.texts(temperature=5)) == 3

    table = "slots = 5\nstrict_names = true\n[aliases]\nother = 'model'\n"
    running.file.write_text(f"host = 'unix:{running.path}'\n{table}[forced]\ntemperature = 0")
    os.kill(running.served.process.pid, signal.SIGHUP)
    running.message("RELOADING=1\nMONOTONIC_USEC=")
    running.message("READY=1")
    running.wait_for_line("changes that need a restart: slots")

    assert len(running.texts(temperature=5)) == 1
    with running.client() as client:
        named = [row["id"] for row in client.get("/v1/models").json()["data"]]
        assert client.post("/v1/completions", json={"model": "b", "prompt": "a"}).status_code == 404
    assert named == ["model", "other"]
    running.file.write_text("[forced")
    running.wait_for_line("kept as it was: cannot read the configuration")
    assert len(running.texts(temperature=5)) == 1
    running.message("WATCHDOG=1")


def test_the_end_is_told_and_leaves_no_socket(running: Running) -> None:
    """The last test."""
    running.served.process.terminate()
    running.message("STOPPING=1")

    running.served.process.join(30)
    assert running.served.process.exitcode == 0
    assert not running.path.exists()
