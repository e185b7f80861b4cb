"""Tags of runs: what a server keeps of them, and that a run goes on without a server."""

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import pytest
from prefect import flow, tags
from prefect.client.orchestration import get_client
from prefect.client.schemas import FlowRun
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from exl2flow.tasks.tags import tag_run


@flow
def converting(source: Path) -> str:
    """Tag this run, and return its id."""
    tag_run(source, "4bpw")
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return str(context.flow_run.id)


@pytest.mark.slow
def test_a_run_is_found_by_its_model_and_its_bits_and_keeps_its_own_tags() -> None:
    with prefect_test_harness():
        with tags("nightly"):
            run = converting(Path("/models/Llama-3.2-1B@0123abc"))
        with get_client(sync_client=True) as client:
            found = client.read_flow_run(run).tags

    assert set(found) == {"nightly", "Llama-3.2-1B", "4bpw"}


class Listener(BaseHTTPRequestHandler):
    """Keeps the requests that would change a run."""

    changes: ClassVar[list[tuple[str, Any]]] = []

    def do_PATCH(self) -> None:  # the name is http.server's
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.changes.append((self.path, json.loads(body)))
        self.send_response(204)
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """What a server is sent that the client of this test talks to."""
    monkeypatch.setattr(Listener, "changes", [])
    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/api"
        with temporary_settings({PREFECT_API_URL: address}):
            yield Listener.changes
        server.shutdown()
        thread.join()


@pytest.fixture
def run() -> Iterator[FlowRun]:
    """A run of a flow, whose code this is."""
    made = FlowRun(flow_id=uuid4(), tags=["nightly"])
    with FlowRunContext.model_construct(flow_run=made):
        yield made


def test_a_run_is_sent_its_model_and_more_beside_its_own_tags(
    changes: list[tuple[str, Any]], run: FlowRun
) -> None:
    tag_run(Path("org/model@0123abc"), "4bpw", "dask")

    ((path, sent),) = changes
    assert path == f"/api/flow_runs/{run.id}"
    assert set(sent["tags"]) == {"nightly", "model", "4bpw", "dask"}


def test_outside_a_run_no_server_is_asked(changes: list[tuple[str, Any]]) -> None:
    tag_run(Path("model"), "4bpw")

    assert changes == []


@pytest.mark.usefixtures("run")
def test_a_server_that_is_away_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    away = {PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}

    with temporary_settings(away), caplog.at_level(logging.WARNING, "exl2flow"):
        tag_run(Path("model"), "4bpw")

    (record,) = [r for r in caplog.records if r.name == "exl2flow.tasks.tags"]
    assert record.message.startswith("cannot tag the run, continuing without: ")
