"""`exl2flow server` and `exl2flow webhook`: what they refuse before anything starts."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.core.errors import ConfigError
from exl2flow.flows.cli import server
from exl2flow.flows.server import lasting
from exl2flow.flows.server.services import DATABASE_VARIABLE, Home, ServerSettings, installed

PROGRAM = (sys.executable, "-m", "exl2flow.flows.cli")


def refusal(*words: object, code: int = 2) -> str:
    """Return what a command says that ends with this code."""
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == code, result.output
    return result.stderr


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


@pytest.fixture
def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_folder_that_is_not_there_is_refused_before_a_home_is_made(tmp_path: Path) -> None:
    home, missing = tmp_path / "home", tmp_path / "missing"

    up = refusal("server", "up", "--home", home, "--gpus", "none", "--folder", missing)
    apply = refusal("server", "apply", "--folder", missing)

    for said in (up, apply):
        assert "does not exist" in " ".join(said.replace("│", " ").split())  # the box wraps lines
    assert not home.exists()


def test_api_that_is_not_set_or_does_not_answer_is_reported(free: int, tmp_path: Path) -> None:
    with temporary_settings({PREFECT_API_URL: "4200"}):
        assert "set PREFECT_API_URL to an address" in refusal("server", "apply")
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        assert "set PREFECT_API_URL to an address" in refusal("server", "apply")
    url = f"http://127.0.0.1:{free}/api"

    with temporary_settings({PREFECT_API_URL: url}):
        said = refusal("server", "apply", "--folder", tmp_path, code=1)

    assert said.startswith(f"error: no Prefect API answers at `{url}")


@pytest.mark.parametrize(
    "url",
    [
        "postgres://me:secret@127.0.0.1/x",
        "postgresql://me:secret@127.0.0.1/x",
        "sqlite:////tmp/x.db",
        "me:secret",
    ],
)
def test_url_of_a_database_that_prefect_cannot_use_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATABASE_VARIABLE, url)

    said = refusal("server", "up", "--home", tmp_path / "home", "--gpus", "none")

    assert said.startswith("error: `database`: ")
    assert "postgresql\\+asyncpg|sqlite\\+aiosqlite" in said
    assert "secret" not in said


def test_commands_that_are_printed_name_a_home_that_is_not_the_usual_one(tmp_path: Path) -> None:
    home = Home(tmp_path / "a home")

    assert home.command("status") == f"exl2flow server status --home '{home.path}'"
    assert Home(Path("~/.exl2flow")).command("down") == "exl2flow server down"
    assert f"`{home.command('up')}` starts one" in refusal(
        "server", "status", "--home", home.path, code=1
    )
    assert (
        refusal("server", "down", "--home", home.path, code=0) == f"nothing ran in `{home.path}`\n"
    )


def test_status_as_json_says_what_is_wrong_without_passwords(free: int, tmp_path: Path) -> None:
    place = Home(tmp_path / "home")
    url = f"http://127.0.0.1:{free}"
    database = "postgresql+asyncpg://me:secret@127.0.0.1:5432/x?password=secret"
    with place.busy(print):
        place.save_settings(ServerSettings(folder=tmp_path, port=free, database=database))

    done = CliRunner().invoke(app, ["server", "status", "--home", str(place.path), "--json"])

    assert done.exit_code == 1
    assert done.stderr == ""
    assert json.loads(done.stdout) == {
        "healthy": False,
        "problems": [
            *(f"{name} does not run" for name in ("supervisor", "server", "worker")),
            f"no server answers at {url}",
        ],
        "url": url,
        "api_url": f"{url}/api",
        "database": "postgresql+asyncpg://me:***@127.0.0.1:5432/x",
        "pool": "exl2flow",
        "folder": str(tmp_path),
        "program": installed(),
        "processes": [],
    }


def test_running_process_of_an_older_program_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Home(tmp_path / "home")
    monkeypatch.setattr(Home, "listed", lambda home: [("supervisor", 1), ("server", 2), ("run", 3)])
    monkeypatch.setattr(Home, "programs", lambda home: {1: installed(), 2: "0.0.1", 3: "0.0.1"})

    [said] = server._older(place)

    assert said.startswith("server: running an older program than the installed one; `exl2flow")
    monkeypatch.setattr(Home, "programs", lambda home: dict.fromkeys((1, 2, 3), installed()))
    assert server._older(place) == []


class Started(Exception):
    """Ends `up` where it would start something; holds the settings."""


def settings_of_up(home: Path, *words: str, monkeypatch: pytest.MonkeyPatch) -> ServerSettings:
    def start(place: Home, settings: ServerSettings, *, say: object) -> list[str]:
        raise Started(settings)

    monkeypatch.setattr(lasting, "up", start)
    result = CliRunner().invoke(app, ["server", "up", "--home", str(home), *words])
    assert isinstance(result.exception, Started), result.output
    return cast("ServerSettings", result.exception.args[0])


def test_server_goes_back_to_sqlite_on_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Home(tmp_path / "home")
    database = "postgresql+asyncpg://me:secret@127.0.0.1:5432/x"
    with place.busy(print):
        place.save_settings(ServerSettings(folder=tmp_path, database=database))
    monkeypatch.delenv(DATABASE_VARIABLE, raising=False)

    assert settings_of_up(place.path, monkeypatch=monkeypatch).database == database
    assert settings_of_up(place.path, "--sqlite", monkeypatch=monkeypatch).database is None
    monkeypatch.setenv(DATABASE_VARIABLE, database)
    assert "names another database; unset it" in refusal(
        "server", "up", "--home", place.path, "--sqlite"
    )


def test_gpu_that_does_not_exist_is_refused_or_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert server._gpus(None) == ("0", "3")
    assert server._gpus("none") == ()
    assert server._gpus("0, 3,GPU-8682b4be") == ("0", "3", "GPU-8682b4be")
    assert server._gpus("0+3") == ("0+3",)
    with pytest.raises(ConfigError, match="no GPU `2`"):
        server._gpus("0+2")
    with pytest.raises(ConfigError, match="names a GPU twice"):
        server._gpus("0+3,0")
    for gpus, lacking in (("0,2", "2"), ("-1", "-1"), ("cuda", "cuda")):
        with pytest.raises(ConfigError, match=f"no GPU `{lacking}`; take some"):
            server._gpus(gpus)
    assert capsys.readouterr().err == ""

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert server._gpus("5") == ("5",)
    assert "the workers of 5 will use the CPU" in capsys.readouterr().err


def test_prefect_collects_no_usage_data(tmp_path: Path) -> None:
    """In a terminal, Prefect says that it does, and gives the user an identity, when imported."""
    kept = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH")  # in CI it would not, whatever we do
    env = {name: os.environ[name] for name in kept if name in os.environ}
    terminal, screen = pty.openpty()
    command = [*PROGRAM, "server", "status", "--home", str(tmp_path / "home")]

    code = subprocess.run(
        command,
        env={**env, "PREFECT_HOME": str(tmp_path / "prefect")},
        stdin=screen,
        stdout=screen,
        stderr=screen,
    ).returncode
    said = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    os.close(screen)

    assert code == 1
    assert "no server was started" in said
    assert "usage data" not in said
    assert not (tmp_path / "prefect" / ".sdk_telemetry").exists()


def receiver(port: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, "webhook", "--port", str(port)],
        env={
            **os.environ,
            "EXL2FLOW_WEBHOOK_SECRET": "agreed on",
            "PREFECT_API_URL": "http://127.0.0.1:1/api",
        },
        stderr=subprocess.PIPE,
        text=True,
    )


def test_receiver_at_a_taken_port_says_so_and_nothing_else(taken: int) -> None:
    with receiver(taken) as process:
        _, said = process.communicate()

    assert process.returncode == 1
    assert said == (
        f"error: cannot listen on `127.0.0.1:{taken}` (Address already in use); choose another "
        "`--port`, or end the program that uses it\n"
    )


@pytest.mark.slow
def test_receiver_that_is_terminated_does_not_speak_of_finished_work(free: int) -> None:
    with receiver(free) as process:
        assert process.stderr is not None
        begun = next(process.stderr)
        with socket.create_connection(("127.0.0.1", free)) as client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert client.recv(4) == b"HTTP"  # uvicorn may log less if it ends while it starts
        process.terminate()
        said = process.stderr.read()

    assert begun == f"receiving on http://127.0.0.1:{free}/\n"
    assert "Finished server process" in said
    assert "finished work" not in said
    assert process.returncode == -signal.SIGTERM
