"""New revisions become events: found by polling a Hub, or told by its webhook."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from prefect.client.orchestration import get_client
from prefect_runs import settled
from servers import PROGRAM, free_port, wait_for

from exl2flow.core.errors import HubError
from exl2flow.tasks.revisions import EVENT

SECRET = "agreed on"
SHAS = tuple(character * 40 for character in "abcd")


class SmallHub:
    """The part of the Hub that is asked for revisions; `heads`: repository → newest commit."""

    def __init__(self) -> None:
        self.heads: dict[str, str] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = hub.answer(self.path)
                body = json.dumps(found if found is not None else {"error": "none"}).encode()
                self.send_response(200 if found is not None else 404)
                if found is None:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def answer(self, target: str) -> Any:
        """Return the JSON of a request's answer, None if there is no such repository."""
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        models = {repo: {"id": repo, "_id": "0", "sha": sha} for repo, sha in self.heads.items()}
        if path == "/api/models":
            return [m for repo, m in models.items() if repo.split("/")[0] in query["author"]]
        return models.get(path.removeprefix("/api/models/"))


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    hub = SmallHub()
    thread = threading.Thread(target=hub.http.serve_forever)
    thread.start()
    yield hub
    hub.http.shutdown()
    thread.join()
    hub.http.server_close()


def events_since(seen: set[str]) -> list[dict[str, Any]]:
    """Return the events of new revisions that the server holds, but those seen before."""
    body = {"filter": {"event": {"name": [EVENT]}}}
    with get_client(sync_client=True) as client:
        events = client.request("POST", "/events/filter", json=body).json()["events"]
    return [event for event in events if event["id"] not in seen]


@pytest.fixture
def seen(prefect_env: Mapping[str, str]) -> set[str]:
    return {event["id"] for event in events_since(set())}


def watched(hub: SmallHub, folder: Path, env: Mapping[str, str], **config: object) -> Any:
    """Run the flow in a process that asks this hub, and return what it found to be new."""
    code = (
        "import json, sys; from exl2flow.flows.watch import WatchConfig, watch\n"
        "found = watch(WatchConfig.model_validate_json(sys.argv[1]))\n"
        "print(json.dumps([[r.repo_id, r.revision] for r in found]))"
    )
    given = json.dumps({"work_root": str(folder), **config})
    endpoint = f"http://127.0.0.1:{hub.http.server_port}"
    done = subprocess.run(
        [sys.executable, "-c", code, given],
        env={**env, "HF_ENDPOINT": endpoint},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_new_revision_is_announced_once(
    hub: SmallHub, prefect_env: Mapping[str, str], seen: set[str], tmp_path: Path
) -> None:
    watch = {"repositories": ["org/one"], "authors": ["someone"]}
    hub.heads = {"org/one": SHAS[0], "someone/two": SHAS[1], "other/three": SHAS[2]}

    first = watched(hub, tmp_path, prefect_env, **watch)
    hub.heads |= {"someone/two": SHAS[3], "other/three": SHAS[3]}
    second = watched(hub, tmp_path, prefect_env, **watch)
    third = watched(hub, tmp_path, prefect_env, **watch)

    assert (first, second, third) == ([], [["someone/two", SHAS[3]]], [])
    [event] = settled(lambda: events_since(seen), lambda found: len(found) > 0)
    assert event["resource"]["prefect.resource.id"] == "hf.model.someone--two"
    assert event["payload"] == {"repo_id": "someone/two", "revision": SHAS[3]}


def test_what_is_there_is_announced_on_request(
    hub: SmallHub, prefect_env: Mapping[str, str], seen: set[str], tmp_path: Path
) -> None:
    hub.heads = {"org/one": SHAS[0]}

    found = watched(hub, tmp_path, prefect_env, repositories=["org/one"], include_existing=True)

    assert found == [["org/one", SHAS[0]]]
    assert settled(lambda: events_since(seen), lambda events: len(events) > 0)


def test_unknown_repository_is_told(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    from exl2flow.tasks.revisions import newest_revisions

    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.http.server_port}")

    with pytest.raises(HubError, match=r"there is no `org/none` on the Hub"):
        newest_revisions.fn(["org/none"], [])


@pytest.fixture(scope="module")
def receiver(prefect_env: Mapping[str, str]) -> Iterator[int]:
    """The port of a running receiver."""
    port = free_port()
    process = subprocess.Popen(
        [*PROGRAM, "webhook", "--port", str(port)],
        env={**prefect_env, "EXL2FLOW_WEBHOOK_SECRET": SECRET},
    )
    try:
        wait_for(lambda: listens(port))
        yield port
    finally:
        process.terminate()
        process.wait()


def listens(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port)
    try:
        connection.connect()
    except OSError:
        return False
    finally:
        connection.close()
    return True


def message(**changes: Any) -> dict[str, Any]:
    """Return what the Hub sends after a push to a model's main branch."""
    return {
        "event": {"action": "update", "scope": "repo.content"},
        "repo": {"type": "model", "name": "org/model", "id": "1", "private": False},
        "updatedRefs": [{"ref": "refs/heads/main", "oldSha": SHAS[0], "newSha": SHAS[1]}],
        "webhook": {"id": "2", "version": 3},
        **changes,
    }


def post(port: int, body: object, secret: str | None = SECRET) -> int:
    """Return the status of the receiver's answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {} if secret is None else {"X-Webhook-Secret": secret}
    text = body if isinstance(body, str) else json.dumps(body)
    connection.request("POST", "/", body=text.encode(), headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_push_to_the_main_branch_becomes_an_event(receiver: int, seen: set[str]) -> None:
    assert post(receiver, message()) == 200

    [event] = settled(lambda: events_since(seen), lambda found: len(found) > 0)
    assert event["resource"]["prefect.resource.id"] == "hf.model.org--model"
    assert event["payload"] == {"repo_id": "org/model", "revision": SHAS[1]}


@pytest.mark.parametrize(
    ("body", "secret", "status"),
    [
        (message(), "another", 401),
        (message(), None, 401),
        ("{", SECRET, 400),
        ({"event": {}}, SECRET, 400),
        (message(event={"action": "create", "scope": "discussion"}), SECRET, 400),
        (message(updatedRefs=[{"ref": "refs/heads/dev", "newSha": SHAS[1]}]), SECRET, 400),
        (message(updatedRefs=[{"ref": "refs/heads/main", "newSha": None}]), SECRET, 400),
        (message(repo={"type": "dataset", "name": "org/model"}), SECRET, 400),
        (message(repo={"type": "model", "name": "../org/model"}), SECRET, 400),
    ],
)
def test_everything_else_is_refused_without_an_event(
    receiver: int, seen: set[str], body: object, secret: str | None, status: int
) -> None:
    assert post(receiver, body, secret) == status

    assert events_since(seen) == []


def test_receiver_without_a_secret_does_not_start() -> None:
    env = {k: v for k, v in os.environ.items() if k != "EXL2FLOW_WEBHOOK_SECRET"}

    done = subprocess.run([*PROGRAM, "webhook"], env=env, capture_output=True, text=True)

    assert done.returncode == 2
    assert "EXL2FLOW_WEBHOOK_SECRET is not set" in done.stderr
