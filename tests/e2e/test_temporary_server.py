"""A conversion by command that starts and ends a Prefect server of its own."""

import http.client
import os
import signal
import sqlite3
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from conversions import QUICK
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings
from servers import PROGRAM, MigratedDatabase, wait_for
from stage_runs import foreign_measurement
from tiny import make_tiny
from typer.testing import CliRunner
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from exl2flow.cli.main import app
from exl2flow.flows.server.temporary import TemporaryServer
from exl2flow.model import resolve

SERVER = b"exl2flow.flows.server.temporary_process"


@pytest.fixture
def env(database: MigratedDatabase, tmp_path: Path) -> Mapping[str, str]:
    home = tmp_path / "home"
    database.give(home)
    own = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    return {**own, "PREFECT_HOME": str(home), "OMP_NUM_THREADS": "1"}


def convert(
    source: Path, out: Path, env: Mapping[str, str], options: Sequence[str] = QUICK
) -> subprocess.CompletedProcess[str]:
    words = [*PROGRAM, "convert", source, "--out", out, *options]
    return subprocess.run(words, env=env, cwd=out.parent, capture_output=True, text=True)


@pytest.mark.slow
def test_server_that_is_killed_under_a_flow_is_named(
    env: Mapping[str, str], tmp_path: Path
) -> None:
    impatient = {**env, "PREFECT_CLIENT_MAX_RETRIES": "0"}
    source = make_tiny("llama", tmp_path / "source")
    words = [*PROGRAM, "convert", source, "--out", tmp_path / "out", *QUICK]
    with subprocess.Popen(words, env=impatient, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: list(tmp_path.glob(".exl2flow/*/validate")))
        [server] = servers(env)
        os.kill(int(server), signal.SIGKILL)
        _, said = process.communicate()

    done = convert(source, tmp_path / "out", env)

    assert process.returncode == 1
    assert "no longer answers" in said
    assert "unexpected" not in said
    assert "Traceback" not in said
    assert done.returncode == 0, done.stderr


def servers(env: Mapping[str, str]) -> list[str]:
    """Return the ids of the temporary servers with this home."""
    home = f"PREFECT_HOME={env['PREFECT_HOME']}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if SERVER in (folder / "cmdline").read_bytes().split(b"\0"):
                found += [folder.name] * (home in (folder / "environ").read_bytes().split(b"\0"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_run_and_its_events_are_stored_before_the_server_ends(
    env: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events are sent by `EventsWorker.drain_all`, log lines by `APILogWorker.drain_all`."""
    source, out = make_tiny("llama", tmp_path / "source", num_hidden_layers=1), tmp_path / "out"
    measurement = foreign_measurement(tmp_path / "measurement.json", resolve(source))
    little = (*QUICK, "--quality", "exllamav2", "--measurement", str(measurement))

    done = convert(source, out, env, little)
    monkeypatch.setenv("PREFECT_HOME", env["PREFECT_HOME"])
    monkeypatch.setenv("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")  # as the command does
    with temporary_settings(restore_defaults={PREFECT_API_URL}):  # no server of another test
        again = CliRunner().invoke(app, ["convert", str(source), "--out", str(out), *little])

    assert done.returncode == 0, done.stderr
    assert again.exit_code == 0, again.stderr
    assert "Prefect" not in again.stderr  # there was nothing to do
    assert "starting a temporary Prefect server" in done.stderr
    assert "this run in the Prefect UI: http://127.0.0.1:" in done.stderr
    assert servers(env) == []
    with closing(sqlite3.connect(Path(env["PREFECT_HOME"], "prefect.db"))) as database:
        states = database.execute("select state_type from flow_run").fetchall()
        (ends,) = database.execute(
            "select count(*) from events where event = 'prefect.flow-run.Completed'"
        ).fetchone()
        (lines,) = database.execute("select count(*) from log").fetchone()
    assert states == [("COMPLETED",)]
    assert ends == 1
    assert lines > 0


@pytest.mark.slow
def test_what_the_plan_refuses_leaves_no_server(env: Mapping[str, str], tmp_path: Path) -> None:
    done = convert(tmp_path / "missing", tmp_path / "out", env)

    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
    assert "Prefect server" not in done.stderr
    assert servers(env) == []


@pytest.mark.slow
def test_server_refuses_other_web_pages_and_ends_well(
    env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", env["PREFECT_HOME"])
    server = TemporaryServer()
    server.wait()
    wanted = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,prefect-csrf-token",
    }

    assert status(server, "OPTIONS", Origin="https://example.test", **wanted) == 400
    assert status(server, "OPTIONS", Origin=server.ui_url, **wanted) == 200
    assert status(server, "POST", Origin="https://example.test") == 403  # sent unasked
    socket = f"ws://{server.ui_url[7:]}/api/events/in"
    connect(socket).close()
    connect(socket, origin=Origin(server.ui_url)).close()
    with pytest.raises(InvalidStatus, match="HTTP 403"):
        connect(socket, origin=Origin("https://example.test"))
    with SyncPrefectClient(api=server.url) as client:
        assert client.create_flow_from_name("seen") is not None

    server.stop()

    assert server._process.returncode == -signal.SIGTERM


def status(server: TemporaryServer, method: str, **headers: str) -> int:
    """Return the status of a request for the API, as a browser sends it."""
    connection = http.client.HTTPConnection(*server.ui_url.removeprefix("http://").split(":"))
    try:
        connection.request(method, "/api/flows/", "{}" if method == "POST" else None, headers)
        return connection.getresponse().status
    finally:
        connection.close()
