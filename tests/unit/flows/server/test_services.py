"""The home of a lasting server: who may change it, its password, its processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from exl2flow.core.errors import ServerFailed
from exl2flow.flows.server import services
from exl2flow.flows.server.services import (
    HOME_VARIABLE,
    MODULES,
    NAME_VARIABLE,
    PROGRAM_VARIABLE,
    Home,
    ServerSettings,
    command,
    environment,
    installed,
    wait_until,
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    found = Home(tmp_path / "home")
    with found.busy(print):
        return found


def test_second_command_waits_until_the_first_has_finished(home: Home) -> None:
    said: list[str] = []
    events: list[str] = []
    waits = threading.Event()

    def hear(text: str) -> None:
        said.append(text)
        waits.set()

    def second() -> None:
        with home.busy(hear):
            events.append("second")

    thread = threading.Thread(target=second)
    with home.busy(print):
        thread.start()
        assert waits.wait(10)
        events.append("first")
    thread.join()

    assert events == ["first", "second"]
    assert said == ["waiting for another `exl2flow server up` or `down`"]


def test_home_that_cannot_exist_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    home = Home(tmp_path / "file" / "home")

    with pytest.raises(ServerFailed, match="damaged or not yours"):
        home.settings()
    with pytest.raises(ServerFailed, match="Not a directory"):
        home.busy(print).__enter__()


@pytest.fixture
def sleeper(home: Home) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start processes of the home that sleep, by name and module; they are killed at the end."""
    started = []

    def start(
        name: str, module: str = "", script: str = "input()", *words: str
    ) -> subprocess.Popen[bytes]:
        env = {**os.environ, HOME_VARIABLE: str(home.path), NAME_VARIABLE: name}
        process = subprocess.Popen(
            [sys.executable, "-c", f"print(flush=True); {script}", module, *words],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_processes_are_found_by_their_environment(
    home: Home, sleeper: Callable[..., subprocess.Popen[bytes]]
) -> None:
    worker = sleeper("worker", f"{MODULES}worker")
    run = sleeper("worker")  # inherits the environment of its worker
    found = home.processes()

    assert {name: process.pid for name, process in found.items()} == {
        "worker": worker.pid,
        f"process {run.pid}": run.pid,
    }
    assert Home(home.path / "other").processes() == {}
    older = sleeper("", f"{MODULES}worker")  # of a version that gave its services no name
    assert f"process {older.pid}" in home.processes()
    for process in (older, run):
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is reaped
    assert home.processes().keys() == {"worker"}


BEGINS_ANOTHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[2]])"


def test_list_of_processes_names_services_then_runs_and_what_dead_workers_left(
    home: Home, sleeper: Callable[..., subprocess.Popen[bytes]]
) -> None:
    left = sleeper("worker-gpu1", script=BEGINS_ANOTHER.replace("sys.argv[2]", "'input()'"))
    worker = sleeper("worker-gpu1", f"{MODULES}worker", BEGINS_ANOTHER, "input()")
    second = sleeper("worker-gpu0", f"{MODULES}worker")
    server = sleeper("server", f"{MODULES}application")
    supervisor = sleeper("supervisor", f"{MODULES}services")
    wait_until(lambda: all(psutil.Process(p.pid).children() for p in (left, worker)), 10)
    [run] = psutil.Process(worker.pid).children()

    assert home.listed() == [
        ("supervisor", supervisor.pid),
        ("server", server.pid),
        ("worker-gpu0", second.pid),
        ("worker-gpu1", worker.pid),
        *sorted([("run", run.pid), ("left by a dead worker", left.pid)], key=lambda row: row[1]),
    ]


def test_command_that_waits_says_what_for_until_it_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    third = threading.Event()

    def hear(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            third.set()

    monkeypatch.setattr(services, "TELL_SECONDS", 0.01)
    with services.telling(hear, "the server"):
        assert third.wait(10)
    heard = len(said)
    time.sleep(0.05)

    assert set(said) == {"waiting for the server (0 s so far)"}
    assert len(said) == heard


def test_processes_that_ignore_sigterm_are_killed(
    home: Home, sleeper: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "STOP_SECONDS", 0.2)
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); input()"
    ignoring = sleeper("worker-gpu0", f"{MODULES}worker", stubborn)
    server = sleeper("server", f"{MODULES}application")
    run = sleeper("worker-gpu0")

    assert set(home.end_all()) == {"worker-gpu0", "server"}

    codes = [process.wait(10) for process in (ignoring, server, run)]
    assert codes[1:] == [-signal.SIGTERM, -signal.SIGTERM]
    assert codes[0] in (-signal.SIGTERM, -signal.SIGKILL)
    assert home.processes() == {}


def test_settings_hold_a_password_that_only_the_owner_can_read(home: Home) -> None:
    first, second = (ServerSettings(folder=home.path) for _ in range(2))
    assert len(first.auth) > 40
    assert first.auth != second.auth
    assert first.auth not in repr(first)
    (home.path / "server.json").write_text("{}")  # readable by all
    (home.path / "server.json").chmod(0o644)

    home.save_settings(first)

    assert home.settings() == first
    assert (home.path / "server.json").stat().st_mode & 0o777 == 0o600
    (home.path / "server.json").write_text(f'{{"auth": "{first.auth}"')
    with pytest.raises(ServerFailed, match=r"`.*server.json` is damaged") as error:
        home.settings()
    assert first.auth not in str(error.value)


def test_services_share_the_password_and_pages_of_others_are_refused(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServerSettings(folder=home.path, gpus=("3", "0+1"))
    server = environment(home, settings, "server")
    worker = environment(home, settings, "worker-gpu3")

    assert server["PREFECT_SERVER_API_AUTH_STRING"] == settings.auth
    assert worker["PREFECT_API_AUTH_STRING"] == server["PREFECT_API_AUTH_STRING"] == settings.auth
    origins = "http://127.0.0.1:4200,http://localhost:4200"
    assert server["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == origins
    assert worker["CUDA_VISIBLE_DEVICES"] == "3"
    both = environment(home, settings, "worker-gpu0-1")
    assert both["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert not [word for word in command(home, settings, "server") if settings.auth in word]
    monkeypatch.setenv("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", "https://mine.test")
    chosen = environment(home, settings, "server")["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]
    assert chosen == "https://mine.test"


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("fe80::1%eth0", "[fe80::1%25eth0]"),
        ("gpu.lan", "gpu.lan"),
    ],
)
def test_address_is_one_that_clients_understand(host: str, shown: str) -> None:
    settings = ServerSettings(host=host, folder=Path())

    assert settings.url == f"http://{shown}:4200"
    assert "[" not in settings.host


def test_process_tells_which_program_it_is(
    home: Home, sleeper: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sleeper("server", f"{MODULES}application")
    monkeypatch.setenv(PROGRAM_VARIABLE, "0.0.1")
    old = sleeper("worker", f"{MODULES}worker")

    settings = ServerSettings(folder=home.path)
    assert environment(home, settings, "worker")[PROGRAM_VARIABLE] == installed()
    assert home.programs() == {before.pid: "unknown", old.pid: "0.0.1"}


def test_end_of_a_log_is_its_last_lines(home: Home) -> None:
    assert home.log_end("server") == "(nothing)"
    (home.logs / "server.log").write_text("\n".join(map(str, range(100))))
    assert home.log_end("server").splitlines() == [str(line) for line in range(85, 100)]


@pytest.fixture
def started(home: Home, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The services that a supervisor starts; each of them ends at once."""
    names: list[str] = []

    def start(home: Home, settings: ServerSettings, name: str) -> subprocess.Popen[bytes]:
        names.append(name)
        process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
        process.wait()
        return process

    monkeypatch.setattr(Home, "start", start)
    monkeypatch.setattr(services, "LOOK_SECONDS", 0.0)
    home.save_settings(ServerSettings(folder=home.path, port=1))
    return names


def test_server_that_ends_before_it_answers_ends_the_supervisor(
    home: Home, started: list[str]
) -> None:
    services.supervise(home)

    assert started == ["server"]


@pytest.mark.parametrize(("pause", "starts"), [(10.0, 1), (0.0, 3)])
def test_services_that_keep_ending_are_restarted_after_a_pause(
    home: Home, started: list[str], monkeypatch: pytest.MonkeyPatch, pause: float, starts: int
) -> None:
    looks = iter((True, True, True))  # the server has answered, and the next look ends the test
    monkeypatch.setattr(services, "answers", lambda url: next(looks))
    monkeypatch.setattr(services, "PAUSE_SECONDS", pause)

    with pytest.raises(StopIteration):
        services.supervise(home)

    assert started == ["server", "worker"] * starts
