"""Which services the supervisor starts, and when."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from exl2flow.flows.server import supervisor as module
from exl2flow.flows.server.services import SERVER, Home, ServerSettings
from exl2flow.flows.server.supervisor import Supervisor


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The services that were started; each of them ends at once."""
    names: list[str] = []

    def start(home: Home, settings: ServerSettings, name: str) -> psutil.Popen:
        names.append(name)
        process = psutil.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
        process.wait()
        return process

    monkeypatch.setattr(Home, "start", start)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    return names


@pytest.fixture
def supervisor(tmp_path: Path, started: list[str]) -> Supervisor:
    return Supervisor(Home(tmp_path), ServerSettings(folder=tmp_path, port=1))


def test_server_that_ends_before_it_answers_ends_the_supervisor(
    supervisor: Supervisor, started: list[str]
) -> None:
    supervisor.run()

    assert started == [SERVER]


def test_service_that_keeps_ending_is_restarted_after_a_pause(
    supervisor: Supervisor, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        supervisor.keep("worker")
    assert started == ["worker"]

    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.0)
    supervisor.keep("worker")
    assert started == ["worker"] * 2


def test_service_that_runs_is_left_alone(supervisor: Supervisor, started: list[str]) -> None:
    supervisor.services[SERVER] = psutil.Process()

    supervisor.keep(SERVER)

    assert started == []
