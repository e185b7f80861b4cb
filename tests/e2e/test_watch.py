"""New revisions become events: found by polling a Hub, or told by its webhook."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from floods import FLOODS, MOST_GROWTH, SECRET, Receiver, flood, hub_shas, receiving
from hub_fixtures import hub
from hub_server import Hub
from prefect.client.orchestration import get_client
from prefect_runs import settled
from servers import PROGRAM

from exl2flow.core.errors import HubError
from exl2flow.flows.watch import WatchConfig, watch
from exl2flow.flows.webhook import MOST_CONNECTIONS
from exl2flow.tasks.revisions import EVENT, Revision, newest_revisions

__all__ = ["hub"]

SEED = 1
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
    with pytest.raises(HubError, match=r"no `org/none` on the Hub"):
        newest_revisions.fn(["org/none"], [])


@pytest.fixture(scope="module")
def receiver(
    prefect_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Receiver]:
    """A running receiver."""
    log = tmp_path_factory.mktemp("receiver") / "log"
    with receiving(dict(prefect_env), log) as running:
        yield running
    assert "Traceback" not in log.read_text()


def message(**changes: Any) -> dict[str, Any]:
    """Return what the Hub sends after a push to a model's main branch."""
    return {
        "event": {"action": "update", "scope": "repo.content"},
        "repo": {"type": "model", "name": "org/model", "id": "1", "private": False},
        "updatedRefs": [{"ref": "refs/heads/main", "oldSha": SHAS[0], "newSha": SHAS[1]}],
        "webhook": {"id": "2", "version": 3},
        **changes,
    }


def post(receiver: Receiver, body: object, secret: str | None = SECRET) -> int:
    """Return the status of the receiver's answer."""
    connection = HTTPConnection("127.0.0.1", receiver.port, timeout=60)
    headers = {} if secret is None else {"X-Webhook-Secret": secret}
    text = body if isinstance(body, str) else json.dumps(body)
    connection.request("POST", "/", body=text.encode(), headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_push_to_the_main_branch_becomes_an_event(receiver: Receiver, seen: set[str]) -> None:
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
    receiver: Receiver, seen: set[str], body: object, secret: str | None, status: int
) -> None:
    assert post(receiver, body, secret) == status

    assert events_since(seen) == []


def test_a_message_that_comes_again_starts_nothing(receiver: Receiver, seen: set[str]) -> None:
    again, other = (
        message(updatedRefs=[{"ref": "refs/heads/main", "newSha": character * 40}])
        for character in "cd"
    )

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda body: post(receiver, body), [again] * 8))
    answers.append(post(receiver, other))

    events = settled(lambda: events_since(seen), lambda found: len(found) > 1)
    assert answers == [200] * 9
    assert sorted(event["payload"]["revision"][0] for event in events) == ["c", "d"]


def test_idle_connections_make_room_for_a_message(receiver: Receiver) -> None:
    with ExitStack() as stack:
        address = ("127.0.0.1", receiver.port)
        idle = [
            stack.enter_context(socket.create_connection(address)) for _ in range(MOST_CONNECTIONS)
        ]

        assert post(receiver, message()) == 200

        idle[0].settimeout(5)
        with suppress(ConnectionResetError):
            assert idle[0].recv(1) == b""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "slow bodies")) for n in FLOODS]
)
def test_messages_of_the_hub_get_through_a_flood(receiver: Receiver, name: str) -> None:
    outcome = flood(receiver, name, 10, SEED, hub_shas(SEED, 0, []))

    assert (outcome.wrong, outcome.lost) == ({}, 0), outcome
    assert outcome.growth <= MOST_GROWTH


def test_receiver_without_a_secret_does_not_start() -> None:
    env = {k: v for k, v in os.environ.items() if k != "EXL2FLOW_WEBHOOK_SECRET"}

    done = subprocess.run([*PROGRAM, "webhook"], env=env, capture_output=True, text=True)

    assert done.returncode == 2
    assert "EXL2FLOW_WEBHOOK_SECRET is not set" in done.stderr
