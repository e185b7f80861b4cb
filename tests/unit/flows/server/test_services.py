"""The home of a lasting server: who may change it, and what is left when writing fails."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from exl2flow.core.errors import ServerFailed
from exl2flow.flows.server import services
from exl2flow.flows.server.services import SUPERVISOR, Home, Process, ServerSettings
from exl2flow.flows.server.supervisor import Supervisor


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


def test_second_command_gives_up_in_the_end(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "BUSY_SECONDS", 0.0)

    with home.busy(print), pytest.raises(ServerFailed, match="is at work in"):
        home.busy(print).__enter__()


def test_home_of_another_user_is_refused(home: Home) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(home.path, 12345, -1)

    with pytest.raises(ServerFailed, match="belongs to the user with number 12345"):
        home.busy(print).__enter__()


def test_home_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    home = Home(tmp_path / "file" / "home")

    with pytest.raises(ServerFailed, match="Not a directory"):
        home.settings()
    with pytest.raises(ServerFailed, match="Not a directory"):
        home.busy(print).__enter__()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"server": 3}', '{"server": {"pid": 1}}'])
def test_damaged_list_of_processes_counts_as_none(home: Home, content: str) -> None:
    (home.path / "services.json").write_text(content)

    assert home.processes() == home.alive() == {}


def test_process_that_has_the_id_of_another_is_not_it(home: Home) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        here = Process.of(process.pid)
        earlier = Process(pid=process.pid, begun=here.begun - 1)
        home.save_processes({"server": here, "worker": earlier})

        earlier.send(9)

        assert home.alive() == {"server": here}
        process.kill()
    assert home.alive() == {}


def test_supervisor_that_cannot_write_tries_again(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    obstacle = home.path / "services.json"
    obstacle.mkdir()
    supervisor = Supervisor(home, ServerSettings(folder=home.path))

    supervisor._save()
    obstacle.rmdir()
    supervisor._save()

    assert "cannot write `services.json`" in caplog.text
    assert home.alive().keys() == {SUPERVISOR}
    assert [path.name for path in home.path.glob(".services*")] == []


def test_reason_is_the_last_exception_of_a_log_or_else_its_end(home: Home) -> None:
    file = home.log("server")
    assert home.reason("server") == "(nothing)"
    file.write_text("first\nerror: second\n")
    assert home.reason("server") == "first\nerror: second"
    file.write_text(
        "ValueError: earlier\n    raise\nasyncpg.exceptions.InvalidPasswordError: no such user\n"
        "(Background on this error)\n\nERROR | uvicorn.error - Application startup failed.\n"
    )
    assert home.reason("server") == "asyncpg.exceptions.InvalidPasswordError: no such user"


def test_database_is_shown_without_its_password(home: Home) -> None:
    for password in ("secret", "sec#ret", "sec/ret"):
        url = f"postgresql+asyncpg://me:{password}@host:5432/name?ssl=require"
        shown = ServerSettings(folder=home.path, database=url).shown_database
        assert shown == "postgresql+asyncpg://host:5432/name"
