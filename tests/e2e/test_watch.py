"""New revisions become events: found by polling a Hub, or told by its webhook."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from hub_fixtures import hub
from hub_server import Hub
from prefect.client.orchestration import get_client
from prefect_runs import settled
from servers import PROGRAM, free_port, wait_for

from exl2flow.core.errors import HubError
from exl2flow.flows.watch import WatchConfig, watch
from exl2flow.tasks.revisions import EVENT, Revision, newest_revisions

__all__ = ["hub"]

SECRET = "agreed on"
SHAS = tuple(character * 40 for character in "ab")


def events_since(seen: set[str]) -> list[dict[str, Any]]:
    """Return the events of new revisions that the server holds, but those seen before."""
    body = {"filter": {"event": {"name": [EVENT]}}}
    with get_client(sync_client=True) as client:
        events = client.request("POST", "/events/filter", json=body).json()["events"]
    return [event for event in events if event["id"] not in seen]


@pytest.fixture
def seen(prefect_env: Mapping[str, str]) -> set[str]:
    return {event["id"] for event in events_since(set())}


def pushed(hub: Hub, repo: str, text: str) -> str:
    """Let a repository hold this file only, and return the commit."""
    if repo not in hub.repos:
        hub.create(repo)
    return hub.commit(repo, "main", {"README.md": hub.entry(text.encode(), is_lfs=False)})


def watched(folder: Path, **values: object) -> list[Revision]:
    """Run the flow and return what it found to be new."""
    return watch(WatchConfig.model_validate({"work_root": folder, **values}))


def test_each_new_revision_is_announced_once(hub: Hub, seen: set[str], tmp_path: Path) -> None:
    both = {"repositories": ["org/one"], "authors": ["someone"]}
    for repo in ("org/one", "someone/two", "other/three"):
        pushed(hub, repo, "old")

    first = watched(tmp_path, **both)
    sha = pushed(hub, "someone/two", "new")
    pushed(hub, "other/three", "new")
    second = watched(tmp_path, **both)
    third = watched(tmp_path, **both)

    assert (first, second, third) == ([], [Revision(repo_id="someone/two", revision=sha)], [])
    [event] = settled(lambda: events_since(seen), lambda found: len(found) > 0)
    assert event["resource"]["prefect.resource.id"] == "hf.model.someone--two"
    assert event["payload"] == {"repo_id": "someone/two", "revision": sha}


def test_what_is_there_is_announced_on_request(hub: Hub, seen: set[str], tmp_path: Path) -> None:
    sha = pushed(hub, "org/one", "old")

    found = watched(tmp_path, repositories=["org/one"], include_existing=True)

    assert found == [Revision(repo_id="org/one", revision=sha)]
    assert settled(lambda: events_since(seen), lambda events: len(events) > 0)


def test_unknown_repository_is_told(hub: Hub) -> None:
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
