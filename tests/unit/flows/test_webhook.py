"""200 means that the event is on the server, and each revision becomes one event."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest
from httpx import ReadTimeout
from starlette.testclient import TestClient

from exl2flow.flows import webhook
from exl2flow.tasks.revisions import Revision

SECRET = "agreed on"
SECONDS = 10.0  # until a test gives up
PAUSE = 0.2  # seconds in which an answer that waits for nothing would come


class Server:
    """A Prefect server that takes events while `refuse` is None; `gate` lets it answer."""

    def __init__(self) -> None:
        self.refuse: Exception | None = None
        self.gate, self.begun, self.taken = threading.Event(), threading.Semaphore(0), list[str]()
        self.gate.set()

    def announce(self, revisions: list[Revision]) -> None:
        self.begun.release()
        assert self.gate.wait(SECONDS)
        if self.refuse is not None:
            raise self.refuse
        self.taken += [f"{one.repo_id}@{one.revision[0]}" for one in revisions]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()
    monkeypatch.setattr(webhook, "announce", found.announce)
    return found


@pytest.fixture
def push(server: Server) -> Iterator[Callable[..., int]]:
    """A function that sends the Hub's message about a push, and returns the answer's status."""

    def send(sha: str, repo: str = "org/a") -> int:
        message = {
            "event": {"action": "update", "scope": "repo.content"},
            "repo": {"type": "model", "name": repo},
            "updatedRefs": [{"ref": "refs/heads/main", "newSha": sha * 40}],
        }
        return client.post("/", json=message, headers={"X-Webhook-Secret": SECRET}).status_code

    with TestClient(webhook.receiver(SECRET), raise_server_exceptions=False) as client:
        yield send


def test_repetitions_wait_for_the_event_and_send_none(
    server: Server, push: Callable[..., int]
) -> None:
    server.gate.clear()

    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(push, "c") for _ in range(4)]
        assert server.begun.acquire(timeout=SECONDS)
        assert not wait(answers, PAUSE, FIRST_COMPLETED).done
        server.gate.set()

    assert [answer.result() for answer in answers] == [200] * 4
    assert server.taken == ["org/a@c"]


def test_repetitions_fail_with_the_first_and_a_later_one_is_sent(
    server: Server, push: Callable[..., int]
) -> None:
    server.gate.clear()
    server.refuse = ReadTimeout("no answer")

    with ThreadPoolExecutor() as pool:
        first = pool.submit(push, "c")
        assert server.begun.acquire(timeout=SECONDS)
        again = pool.submit(push, "c")
        assert not wait([first, again], PAUSE, FIRST_COMPLETED).done
        server.gate.set()

    assert {first.result(), again.result()} == {503}
    server.refuse = None
    assert push("c") == 200
    assert server.taken == ["org/a@c"]


def test_an_unexpected_error_leaves_the_revision_unannounced(
    server: Server, push: Callable[..., int]
) -> None:
    server.refuse = RuntimeError("failed to reach API")
    assert push("c") == 500

    server.refuse = None

    assert push("c") == 200
    assert server.taken == ["org/a@c"]


def test_a_push_back_to_an_earlier_commit_is_news(server: Server, push: Callable[..., int]) -> None:
    pushes = ("ca", "cb", "ca", "da", "ca", "cb")  # commit and repository

    answers = [push(sha, f"org/{name}") for sha, name in pushes]

    assert answers == [200] * 6
    assert server.taken == ["org/a@c", "org/b@c", "org/a@d", "org/a@c"]


def test_a_late_repetition_of_an_older_commit_changes_nothing(
    server: Server, push: Callable[..., int]
) -> None:
    server.gate.clear()

    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(push, "a")]
        assert server.begun.acquire(timeout=SECONDS)
        answers.append(pool.submit(push, "b"))
        assert server.begun.acquire(timeout=SECONDS)
        answers.append(pool.submit(push, "a"))
        assert not wait(answers, PAUSE, FIRST_COMPLETED).done
        server.gate.set()

    assert push("b") == 200
    assert sorted(server.taken) == ["org/a@a", "org/a@b"]


def test_memory_is_bounded_by_the_number_of_repositories(
    server: Server, push: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "MOST_REMEMBERED", 2)

    for name in "abbca":  # `a` is forgotten when `c` comes
        push("c", f"org/{name}")

    assert [taken[4] for taken in server.taken] == ["a", "b", "c", "a"]
