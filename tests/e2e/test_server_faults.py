"""Faults around a lasting server: two commands at once, a killed supervisor, a taken port."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from servers import LastingServer, wait_for

from exl2flow.flows.server.services import Home


@pytest.fixture
def server(tmp_path: Path) -> LastingServer:
    return LastingServer(home=tmp_path / "home of a server", folder=tmp_path)


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def stranger(server: LastingServer) -> Iterator[HTTPServer]:
    """Another program at the server's port that answers like a healthy server."""
    with HTTPServer(("127.0.0.1", server.port), Healthy) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.mark.slow
def test_another_server_at_the_port_is_not_taken_for_ours(
    server: LastingServer, stranger: HTTPServer
) -> None:
    done = server.call("up", "--port", str(server.port), "--gpus", "none")

    assert done.returncode == 1
    assert f"cannot listen on `127.0.0.1:{server.port}`" in done.stderr
    assert server.processes() == []


@pytest.mark.slow
def test_server_is_one_whoever_starts_it_and_whoever_is_killed(server: LastingServer) -> None:
    options = ("up", "--port", str(server.port), "--gpus", "none")
    try:
        with ThreadPoolExecutor() as pool:
            both = list(pool.map(lambda words: server.call(*words), (options, options)))
        begun = Home(server.home).processes()
        other = server.call("up", "--gpus", "7")
        os.kill(begun["supervisor"].pid, signal.SIGKILL)
        wait_for(lambda: "supervisor" not in Home(server.home).processes())
        left = Home(server.home).processes()
        again = server.call("up")
        replaced = Home(server.home).processes()
        is_healthy = server.is_healthy()
    finally:
        server.call("down")

    assert [done.returncode for done in both] == [0, 0], both
    assert sum("waiting for another" in done.stderr for done in both) == 1
    assert begun.keys() == {"supervisor", "server", "worker"}
    assert other.returncode == 1
    assert "runs with other options" in other.stderr
    assert again.returncode == 0, again.stderr
    assert is_healthy
    assert left.keys() == {"server", "worker"}
    assert replaced.keys() == begun.keys()
    assert all(replaced[name].pid != begun[name].pid for name in begun)
    assert server.processes() == []
