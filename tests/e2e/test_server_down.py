"""Lasting servers that do not start, and one on PostgreSQL."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from postgres import PASSWORD, cluster, programs
from servers import (
    LastingServer,
    MigratedDatabase,
    free_port,
    long_conversion,
    manifest_of,
    wait_for,
    wait_for_cursor,
)

from exl2flow.flows.server.services import DATABASE_VARIABLE, Home


@pytest.fixture
def server(tmp_path: Path) -> LastingServer:
    return LastingServer(home=tmp_path / "home", folder=tmp_path)


def test_taken_port_is_reported(server: LastingServer) -> None:
    with socket.create_server(("127.0.0.1", server.port)):
        done = server.call("up", "--port", str(server.port), "--gpus", "none")

    assert done.returncode == 1
    assert f"cannot listen on `127.0.0.1:{server.port}`" in done.stderr
    assert "Traceback" not in done.stderr
    assert server.processes() == []


@pytest.mark.slow
def test_server_that_dies_is_reported_with_the_end_of_its_log(server: LastingServer) -> None:
    missing = server.folder / "missing" / "home.db"
    database = f"sqlite+aiosqlite:///{missing}?mode=ro"

    options = ("--port", str(server.port), "--gpus", "none")
    done = server.call("up", *options, **{DATABASE_VARIABLE: database})

    assert done.returncode == 1
    assert "the Prefect server ended" in done.stderr
    assert "unable to open database file" in done.stderr
    assert server.processes() == []


TESTS = """
import sys, time
from pathlib import Path
from servers import LastingServer

home = Path(sys.argv[1])
LastingServer(home=home, folder=home.parent).up()
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_server_of_killed_tests_ends(server: LastingServer, database: MigratedDatabase) -> None:
    database.give(server.home / "prefect")
    here = str(Path(__file__).parents[1] / "support")
    env = {**os.environ, "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}
    words = [sys.executable, "-c", TESTS, server.home]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        assert tests.stdout.readline() == "up\n"
        begun = Home(server.home).processes()

        tests.kill()

    assert begun.keys() == {"supervisor", "server", "worker"}
    wait_for(lambda: server.processes() == [])


@pytest.mark.slow
def test_database_that_does_not_answer_is_reported_without_its_password(
    server: LastingServer,
) -> None:
    database = f"postgresql+asyncpg://me:secret@127.0.0.1:{free_port()}/x"

    options = ("--port", str(server.port), "--gpus", "none")
    done = server.call("up", *options, **{DATABASE_VARIABLE: database})

    assert done.returncode == 1
    assert "ConnectionRefusedError" in done.stderr
    assert "secret" not in done.stderr
    assert server.processes() == []


@pytest.mark.slow
def test_home_without_a_server_is_reported(server: LastingServer) -> None:
    assert "no server was started in" in server.call("status").stderr
    assert "nothing ran" in server.call("down").stderr


@pytest.mark.slow
def test_run_on_postgresql_goes_on_after_down_and_up(server: LastingServer) -> None:
    found = programs()
    if found is None:
        pytest.skip("PostgreSQL is not installed, and cannot be")
    config = long_conversion(server.folder)
    with cluster(found) as url:
        try:
            server.up(**{DATABASE_VARIABLE: url})
            run = server.submit("convert/convert", config.model_dump(mode="json"))
            wait_for_cursor(config, "measure", 2)
            server.call("down")
            assert manifest_of(config, "measure")["status"] == "partial"
            server.up()

            with server.used():
                assert server.wait(run) == "Completed"
            status = server.call("status")
        finally:
            server.call("down")

    assert status.returncode == 0, status.stderr
    assert PASSWORD not in str(status)
    assert not (server.home / "prefect" / "prefect.db").exists()
