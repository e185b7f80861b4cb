"""Flood `exl2flow webhook` with all that a stranger may send; the Hub's messages must get through.

    python campaigns/floods.py --scale 20 --seed 1

Everything is on 127.0.0.1: a temporary Prefect server, the receiver in front of it, the clients.
"""

import argparse
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))

import psutil
from state import HELP, State

SECRET = "agreed on"
REPO, BROKEN = "org/model", "org/broken"
CLIENTS, SLOW_CLIENTS = 20, 150  # threads; the second is more than the connections at a time
PATIENCE_SECONDS = 20.0  # of a client; the receiver ends a connection sooner
ANSWER_SECONDS = 10.0  # for a message of the Hub, whatever else arrives
MOST_GROWTH = 100 << 20  # bytes of memory
CUT = "cut"  # in place of a status: the receiver ended the connection
BEGIN = f"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Webhook-Secret: {SECRET}\r\n".encode()
DEEP = 100_000  # brackets
MESSAGES = "messages of the Hub"


def message(sha: str, repo: str = REPO) -> dict[str, Any]:
    """Return what the Hub sends after a push to a model's main branch."""
    return {
        "event": {"action": "update", "scope": "repo.content"},
        "repo": {"type": "model", "name": repo, "id": "1", "private": False},
        "updatedRefs": [{"ref": "refs/heads/main", "oldSha": "0" * 40, "newSha": sha}],
    }


def post(body: bytes, *, secret: str | None = SECRET) -> bytes:
    """Return a request."""
    header = b"" if secret is None else f"X-Webhook-Secret: {secret}\r\n".encode()
    length = f"Content-Length: {len(body)}\r\n\r\n".encode()
    return b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + header + length + body


@dataclass(frozen=True, slots=True)
class Receiver:
    """A running `exl2flow webhook`."""

    process: subprocess.Popen[bytes]
    port: int

    def send(self, *pieces: bytes, pause: float = 0.0) -> str:
        """Send pieces of a request, and return the status of the answer, or that there is none."""
        answer = b""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.settimeout(PATIENCE_SECONDS)
            with suppress(OSError):
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(pause)
            while piece := connection.recv(1 << 16):
                answer += piece
        return answer.split()[1].decode() if answer.startswith(b"HTTP/1.1 ") else CUT

    def memory(self) -> int:
        """Return the bytes of main memory that the process holds."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def descriptors(self) -> int:
        """Return the number of open files and connections."""
        return int(psutil.Process(self.process.pid).num_fds())


Flood = Callable[[Receiver, random.Random], str]


def wrong_secret(receiver: Receiver, rng: random.Random) -> str:
    """Send a good message with a secret that is nearly right, or none."""
    near = [SECRET[:-1], SECRET + "n", SECRET.upper(), "", "agreed \xf6n", "x" * 10_000, None]
    return receiver.send(post(json.dumps(message("e" * 40)).encode(), secret=rng.choice(near)))


def replay(receiver: Receiver, rng: random.Random) -> str:
    """Send one of ten good messages, each of a repository of its own, once more."""
    digit = rng.randrange(10)
    return receiver.send(post(json.dumps(message(f"{digit}" * 40, f"org/old-{digit}")).encode()))


def broken_json(receiver: Receiver, rng: random.Random) -> str:
    """Send a message with some bytes changed, cut, doubled, or something nested deeply."""
    body = bytearray(json.dumps(message("f" * 40, BROKEN)).encode())
    kind = rng.randrange(8)
    if kind == 0:
        body = bytearray(rng.choice([b"[", b'{"event":', b"[{"]) * DEEP)
    elif kind == 1:
        body = bytearray(rng.randbytes(rng.randrange(5000)))
    elif kind == 2:
        values = [None, [], 1e308, 10**400, "\ud800", {"name": [["x"] * 50_000]}]
        name = rng.choice(["event", "repo", "updatedRefs"])
        body = bytearray(
            json.dumps({**message("f" * 40, BROKEN), name: rng.choice(values)}).encode()
        )
    elif kind == 3:
        body = body[: rng.randrange(len(body))]
    else:
        for _ in range(rng.randrange(1, 8)):
            body[rng.randrange(len(body) - 60)] = rng.choice(b'\0"{}[]:,\xff\x80\\')
    return receiver.send(post(bytes(body)))


def huge_body(receiver: Receiver, rng: random.Random) -> str:
    """Send a body of up to 64 MiB, with its length or in chunks, with the right secret or not."""
    pieces = rng.randrange(2, 64)
    secret = rng.choice([SECRET, "wrong"])
    begin = post(b"", secret=secret).partition(b"Content-Length")[0]
    filler = b'{"event": "' + b" " * ((1 << 20) - 11)
    if rng.random() < 0.5:
        length = f"Content-Length: {pieces << 20}\r\n\r\n".encode()
        return receiver.send(begin + length, *[filler] * pieces)
    chunk = b"%x\r\n%s\r\n" % (len(filler), filler)
    return receiver.send(begin + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * pieces)


def slow(receiver: Receiver, rng: random.Random) -> str:
    """Send nothing at all, or a byte of the headers or of the body every second."""
    whole = post(json.dumps(message("c" * 40)).encode(), secret=rng.choice([SECRET, "wrong"]))
    begun = rng.choice([0, rng.randrange(40), whole.index(b"\r\n\r\n") + 10])
    rest = [bytes([byte]) for byte in whole[begun:]] if rng.random() < 0.7 else []
    return receiver.send(whole[:begun], *rest[:30], pause=1.0)


def garbage(receiver: Receiver, rng: random.Random) -> str:
    """Send what is not HTTP, too much of it, or HTTP that only attackers write."""
    requests = [
        rng.randbytes(rng.randrange(1, 3000)) + b"\r\n\r\n",
        b"GET /" + b"a" * rng.randrange(1 << 17) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + b"X-A: b\r\n" * rng.randrange(20_000) + b"\r\n",
        BEGIN + b"Content-Length: -1\r\n\r\n",
        BEGIN + b"Content-Length: 5\r\nContent-Length: 50\r\n\r\nhello",
        BEGIN + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1",
        BEGIN + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
        BEGIN + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        (BEGIN + b"Content-Length: 2\r\n\r\n{}") * rng.randrange(1, 500),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
        rng.choice([b"GET", b"PUT", b"OPTIONS", b"TRACE"]) + b" / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /../../etc/passwd HTTP/1.0\r\n\r\n",
    ]
    return receiver.send(rng.choice(requests))


def hasty(receiver: Receiver, rng: random.Random) -> str:
    """Connect, perhaps begin a request, and leave."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", receiver.port)) as connection:
        connection.sendall(BEGIN[: rng.choice([0, 20, len(BEGIN)])])
        if rng.random() < 0.3:
            connection.sendall(b"Content-Length: 1000\r\n\r\n{")
    return "left"


# Flood → (function, requests at scale 1, statuses that are right)
FLOODS: dict[str, tuple[Flood, int, set[str]]] = {
    "wrong secret": (wrong_secret, 100, {"401", "400"}),  # 400: a header of 10,000 bytes
    "replays": (replay, 100, {"200"}),
    "broken JSON": (broken_json, 100, {"400", "200"}),  # 200: a field that does not matter
    "huge bodies": (huge_body, 10, {"401", "413", CUT}),
    "slow bodies": (slow, 20, {"401", CUT}),
    "not HTTP": (garbage, 100, {"400", "401", "404", "405", "422", CUT}),
    "hasty": (hasty, 200, {"left"}),
}


@contextmanager
def receiving(env: dict[str, str], log: Path) -> Iterator[Receiver]:
    """Run the receiver for the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    words = [sys.executable, "-m", "exl2flow.flows.cli", "webhook", "--port", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            words, env={**env, "EXL2FLOW_WEBHOOK_SECRET": SECRET}, stdout=file, stderr=file
        )
    receiver = Receiver(process, port)
    deadline = time.monotonic() + 60
    try:
        while receiver.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") != "405":
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield receiver
    finally:
        process.terminate()
        process.wait()


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one flood did.

    next: number of the first request that was not begun. messages: of the Hub meanwhile; slowest:
    seconds that they took.
    """

    next: int
    answers: Counter[str]
    wrong: dict[int, str]  # number of the request → its answer
    messages: int
    slowest: float
    lost: int  # messages of the Hub that got no answer in time
    growth: int  # bytes of memory


def flood(
    receiver: Receiver,
    name: str,
    count: int,
    seed: int,
    shas: Iterator[str],
    *,
    first: int = 0,
    end: float = math.inf,
) -> Outcome:
    """Send a flood from many clients, and meanwhile the Hub's messages; wait until it is over.

    first: number of the first request; end: when to begin no more.
    """
    function, _, right = FLOODS[name]
    before, most = receiver.memory(), 0
    times: list[float] = []
    lost = 0
    with ThreadPoolExecutor(SLOW_CLIENTS if function is slow else CLIENTS) as pool:
        rngs = [random.Random(f"{seed}/{name}/{index}") for index in range(first, first + count)]
        futures = [pool.submit(function, receiver, rng) for rng in rngs]
        while True:
            begun = time.monotonic()
            status = receiver.send(post(json.dumps(message(next(shas))).encode()))
            times.append(time.monotonic() - begun)
            lost += status != "200" or times[-1] > ANSWER_SECONDS
            most = max(most, receiver.memory())
            if time.monotonic() > end:
                for future in futures:
                    future.cancel()  # unless it has begun
            if all(future.done() for future in futures):
                break
            time.sleep(0.2)
    ended = {
        number: future.result()
        for number, future in enumerate(futures, first)
        if not future.cancelled()
    }
    return Outcome(
        next=max(ended, default=first - 1) + 1,
        answers=Counter(ended.values()),
        wrong={number: status for number, status in ended.items() if status not in right},
        messages=len(times),
        slowest=max(times),
        lost=lost,
        growth=most - before,
    )


def hub_shas(seed: int, first: int, sent: list[str]) -> Iterator[str]:
    """Yield new commits, and note them. first: how many there were before."""
    rng = random.Random(f"{seed}/hub/{first}")
    while True:
        sent.append(rng.randbytes(20).hex())
        yield sent[-1]


def announced(expected: set[str], seconds: float = 30.0) -> list[str]:
    """Return the revisions of all events that the Prefect server has, once it has these."""
    from prefect.client.orchestration import get_client

    deadline = time.monotonic() + seconds
    while True:
        found: list[str] = []
        with get_client(sync_client=True) as client:
            body = {"filter": {"event": {"name": ["exl2flow.revision"]}}, "limit": 50}
            page = client.request("POST", "/events/filter", json=body).json()
            while True:
                found += [event["payload"]["revision"] for event in page["events"]]
                if not page["next_page"]:
                    break
                query = page["next_page"].partition("?")[2]
                page = client.request("GET", f"/events/filter/next?{query}").json()
        if expected <= set(found) or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def checked(receiver: Receiver, log: Path, sent: list[str], descriptors: int) -> dict[str, int]:
    """Return how often the receiver did what it must not. sent: commits of all messages so far."""
    events = Counter(announced(set(sent)))
    accepted = {digit * 40 for digit in "0123456789f"}  # replays, and nearly broken ones
    text = log.read_text(errors="replace")
    return {
        "message of the Hub without an event": len(set(sent) - set(events)),
        "event without a message": len(set(events) - set(sent) - accepted),
        "second event of a message": sum(count > 1 for count in events.values()),
        "traceback in the log": text.count("Traceback"),
        "secret in the log": text.count(SECRET),
        "process ended": int(receiver.process.poll() is not None),
        "connection left open": max(0, receiver.descriptors() - descriptors - 5),
    }


def add(state: State, name: str, outcome: Outcome) -> None:
    """Count a flood."""
    failures = {number: f"answer {status}" for number, status in outcome.wrong.items()}
    if outcome.growth > MOST_GROWTH:
        failures[outcome.next] = f"{outcome.growth >> 20} MiB more memory"
    state.add(
        name,
        after=outcome.next,
        tried=outcome.answers.total(),
        failures=failures,
        counts=outcome.answers,
        most={"MiB": outcome.growth / 2**20, "s of a message": outcome.slowest},
    )


def campaign(
    receiver: Receiver, log: Path, goals: Mapping[str, int], state: State, end: float
) -> None:
    """Run floods, a small one of each kind in turn, and look at the receiver after each round."""
    sent: list[str] = []
    shas = hub_shas(state.seed, state.tried(MESSAGES), sent)
    descriptors = receiver.descriptors()
    known: dict[str, int] = {}
    left = [name for name, goal in goals.items() if state.begin(name) < goal]
    while left and time.monotonic() < end:
        lost, before = 0, len(sent)
        for name in sorted(left, key=lambda name: state.next[name] / FLOODS[name][1]):
            if time.monotonic() > end:
                break
            first = state.next[name]
            count = min(FLOODS[name][1], goals[name] - first)
            outcome = flood(receiver, name, count, state.seed, shas, first=first, end=end)
            add(state, name, outcome)
            lost += outcome.lost
            state.save()
        found = checked(receiver, log, sent, descriptors)
        new = {what: n - known.get(what, 0) for what, n in found.items() if n > known.get(what, 0)}
        known = {what: max(n, known.get(what, 0)) for what, n in found.items()}
        failures = {f"{before}, {what}": f"{n} times" for what, n in new.items()}
        if lost:
            failures[f"{before}, lost"] = f"{lost} had no answer in {ANSWER_SECONDS:.0f} s"
        state.add(MESSAGES, tried=len(sent) - before, failures=failures)
        state.save(now=True)
        left = [name for name in left if state.next[name] < goals[name]]


def main() -> int:
    """Run the campaign and print its table; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scale", type=float, default=20.0, help="times the smallest campaign")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of all floods, at most")
    parser.add_argument("--state", type=Path, help=HELP)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    state = State.opened("floods", path=options.state, seed=options.seed)
    goals = {name: max(1, round(count * options.scale)) for name, (_, count, _) in FLOODS.items()}
    with tempfile.TemporaryDirectory(prefix="floods-") as folder:
        os.environ["PREFECT_HOME"] = folder
        os.environ.pop("PREFECT_API_URL", None)
        from exl2flow.flows.server.temporary import api

        log = Path(folder) / "receiver.log"
        with api() as server:
            server.wait()
            env = {**os.environ, "PREFECT_API_URL": server.url}
            with receiving(env, log) as receiver:
                campaign(receiver, log, goals, state, end)
        if state.failed:
            print(log.read_text(errors="replace")[-3000:])
    return state.finish("flood")


if __name__ == "__main__":
    sys.exit(main())
