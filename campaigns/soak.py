"""Let 16 clients send random requests to one server for long; nothing may be lost, nothing grow.

    python campaigns/soak.py --seconds 3600 --seed 1 --state soak.json

The server is `exl2flow serve` of the demo model on the CPU, with keys, cached pages in memory and
on disk, a second model to swap with, and less room than its texts want. Request N of client C
depends on the seed, C and N only. After a time to warm up, and again at the end, all clients pause:
then every page must be free, and descriptors, threads and memory must be as they were.
"""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))

import httpx
import psutil
import tally
from bodies import Drawn, drawn, problems
from serving import DEMO, Served, serving
from sources import ROOT

CLIENTS = 16
LEAVING = 0.2  # of the clients
WARM_SECONDS = 180.0  # at most, and a third of the whole
MOST_GROWTH = 50 << 20  # bytes
MOST_THREADS = 6  # more: pools start threads until they have as many as they may
IDLE_SECONDS = 60.0  # in which an abandoned server becomes idle
PATIENCE_SECONDS = 300.0  # for an answer
PAUSE_SECONDS = 60.0  # between lines
MODELS = ("one", "two")
KEYS = ("first", "second", "third")
TEMPLATE = ROOT / "tests" / "golden" / "serve" / "agents" / "agent.jinja"
PARTS = ("keys", "isolate", "ram", "disk", "swap")  # of the server's flags
NO_5XX, ENDS, REFUSALS, PAGES = "no 5xx", "one end, tokens", "refused with 400", "all pages free"
DESCRIPTORS, THREADS, MEMORY, CODE = "descriptors", "threads", "memory", "SIGTERM ends with 0"
CHECKS = (NO_5XX, ENDS, REFUSALS, PAGES, DESCRIPTORS, THREADS, MEMORY, CODE)
NO_ROOM, DEAD_END = "context_length_exceeded", "filter_dead_end"  # codes of a 400 that is right


@dataclass(slots=True)
class Found:
    """What a run has shown so far; it is the state file.

    tried, failed: by name of a check. failures: where they were, the first hundred.
    """

    seed: int
    seconds: float
    without: list[str]
    requests: int = 0
    tokens: int = 0
    left: int = 0
    busy: int = 0
    refused: int = 0
    preemptions: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    minutes: list[str] = field(default_factory=list)
    used: dict[str, dict[str, int]] = field(default_factory=dict)
    is_done: bool = False

    def check(self, name: str, problem: object, where: str = "") -> None:
        """Count a check, and note what is wrong."""
        self.tried[name] += 1
        if problem:
            self.failed[name] += 1
            print(f"FAILED {name}: {where} {problem}", file=sys.stderr, flush=True)
            if len(self.failures) < 100:
                self.failures.append(f"{name}: {where} {problem}")


def used(server: Served) -> dict[str, int]:
    """Return what the process of a server holds; memory: private bytes of it and its children."""
    process = psutil.Process(server.process.pid)
    family = [process, *process.children(recursive=True)]
    return {
        DESCRIPTORS: process.num_fds(),
        THREADS: process.num_threads(),
        MEMORY: sum(one.memory_full_info().uss for one in family),
    }


@contextmanager
def started(without: list[str]) -> Iterator[Served]:
    """Start a server with all flags but some, in temporary folders."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        for model in MODELS:
            copy = shutil.copytree(DEMO, folder / "models" / model)
            shutil.copy(TEMPLATE, copy / "chat_template.jinja")
        keys = folder / "keys.toml"
        rows = [f'[[key]]\nname = "{key}"\nkey = "{key}"\nwaiting = 6\n' for key in KEYS]
        keys.write_text("\n".join(rows) + "admin = true\n")
        keys.chmod(0o600)
        parts = {
            "keys": ("--keys", str(keys)),
            "isolate": ("--isolate",),
            "ram": ("--cache-ram", "8MB"),
            "disk": ("--cache-disk", str(folder / "pages"), "--cache-disk-size", "24MB"),
            "swap": ("--models", str(folder / "models"), "--swap"),
        }
        flags = [flag for part in PARTS if part not in without for flag in parts[part]]
        small = ("--tokens", "3072", "--slots", "8", "--open-metrics")
        with serving(*small, *flags, model=folder / "models" / MODELS[0]) as server:
            yield server


class Clients:
    """Sixteen clients of one server, each with a key; numbers of requests go on between turns."""

    def __init__(self, server: Served, found: Found) -> None:
        """No client has begun."""
        self._server, self._found = server, found
        self._numbers = [count() for _ in range(CLIENTS)]

    async def run(self, seconds: float) -> None:
        """Send requests for some time; return when all have ended."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for client in range(CLIENTS):
                group.create_task(self._client(client, end))

    async def _client(self, client: int, end: float) -> None:
        leaves = client < LEAVING * CLIENTS
        base = {
            "base_url": self._server.url,
            "timeout": PATIENCE_SECONDS,
            "headers": header(client),
        }
        async with httpx.AsyncClient(**base) as http:
            while time.monotonic() < end:
                number = next(self._numbers[client])
                rng = random.Random(f"{self._found.seed}/{client}/{number}")
                asked = drawn(rng, model=MODELS[0], other=MODELS[1], leaves=leaves)
                await self._ask(http, asked, f"client {client}, request {number}, {asked.path}:")

    async def _ask(self, http: httpx.AsyncClient, asked: Drawn, where: str) -> None:
        found = self._found
        found.requests += 1
        found.sent[asked.path] += 1
        try:
            async with asyncio.timeout(asked.leaves):
                answer = await http.post(asked.path, json=asked.body)
        except TimeoutError:
            found.left += 1
            return
        except httpx.HTTPError as error:
            found.check(ENDS, f"{error!r}", where)
            return
        try:
            self._judge(asked, answer, where)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            found.check(ENDS, f"no such form, {error!r}: {answer.text[-500:]!r}", where)

    def _judge(self, asked: Drawn, answer: httpx.Response, where: str) -> None:
        found, status = self._found, answer.status_code
        shown = status >= 400 and f"{status} {answer.text[:500]}"
        found.check(NO_5XX, status >= 500 and shown, where)
        if status in (429, 529):  # a key with many requests, in Anthropic's form
            found.busy += 1
            found.check(NO_5XX, not answer.headers.get("retry-after"), where)
            return
        if status >= 500:
            return
        is_right = NO_ROOM in answer.text or DEAD_END in answer.text or asked.is_wrong
        if status == 400 and is_right:
            found.refused += 1
        if asked.is_wrong or status != 200:
            found.check(
                REFUSALS,
                (status != 400 or not is_right) and (shown or f"{status} {asked.body}"),
                where,
            )
            return
        found.check(ENDS, "; ".join(problems(asked, answer.text)), where)


def header(client: int) -> dict[str, str]:
    """Return a client's key."""
    return {"authorization": f"Bearer {KEYS[client % len(KEYS)]}"}


async def is_idle(http: httpx.AsyncClient) -> dict[str, Any]:
    """Wait until nothing runs, and return the status of the server."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        status: dict[str, Any] = (await http.get("/v1/status")).json()
        if not status["running"] and not status["waiting"]:
            return status
        if time.monotonic() > deadline:
            return status
        await asyncio.sleep(0.2)


async def paused(server: Served, found: Found, name: str) -> dict[str, int]:
    """Check that all pages are free, and return what the server holds without a client."""
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS) as http:
        grammar = {
            "model": MODELS[0],
            "prompt": "",
            "max_tokens": 8,
            "regex_pattern": f"{name}[a-z]",
        }
        answer = await http.post("/v1/completions", json=grammar, headers=header(0))
        assert answer.status_code == 200, answer.text  # now one model and its helper are there
        status = await is_idle(http)
        free, pages = status["cache"]["free_pages"], status["cache_pages"]
        problem = free != pages and f"{free} of {pages}: {status}"
        found.check(PAGES, problem, name)
        found.preemptions = max(found.preemptions, status["preemptions"])
    await asyncio.sleep(2)  # for the connection
    found.used[name] = used(server)
    return found.used[name]


async def minutes(server: Served, found: Found, state: Path | None) -> None:
    """Print a line per minute, and keep it."""
    begun = time.monotonic()
    while True:
        await asyncio.sleep(PAUSE_SECONDS)
        held = used(server)
        line = (
            f"{time.monotonic() - begun:.0f} s: {found.requests} requests, {found.left} left, "
            f"{found.refused} refused, {found.busy} busy, {found.failed[NO_5XX]} 5xx, "
            f"{found.failed.total()} failures, {held[MEMORY] >> 20} MiB"
        )
        print(line, flush=True)
        found.minutes.append(line)
        tally.save(found, state)


async def soak(server: Served, found: Found, state: Path | None) -> None:
    """Run the clients twice, and compare what the server holds behind each time."""
    clients, begun = Clients(server, found), time.monotonic()
    shown = asyncio.create_task(minutes(server, found, state))
    await clients.run(min(WARM_SECONDS, found.seconds / 3))
    before = await paused(server, found, "warm")
    await clients.run(found.seconds - (time.monotonic() - begun))
    shown.cancel()
    after = await paused(server, found, "end")
    for name, most in ((DESCRIPTORS, 0), (THREADS, MOST_THREADS), (MEMORY, MOST_GROWTH)):
        grown = after[name] - before[name]
        found.check(name, grown > most and f"{before[name]} → {after[name]}")
    server.process.terminate()
    await asyncio.to_thread(server.process.join, IDLE_SECONDS)
    code = server.process.exitcode
    found.check(CODE, "none" if code is None else code)


def report(found: Found) -> str:
    """Return the table of a run."""
    lines = [
        f"seed {found.seed}, {found.seconds:.0f} s: {found.requests:,} requests "
        f"({', '.join(f'{path} {n:,}' for path, n in found.sent.most_common())}), "
        f"{found.left:,} left, {found.refused:,} refused, {found.busy:,} busy",
        *(f"{name}: {held}" for name, held in found.used.items()),
        "",
        tally.table("check", {name: found.tried[name] for name in CHECKS}, found.failed),
    ]
    return "\n".join([*lines, *(f"FAILED {one}" for one in found.failures)])


def main() -> int:
    """Run the campaign and print its table; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", nargs="*", default=[], choices=PARTS, help="flags left out")
    parser.add_argument("--state", type=Path, help="file of the result, written every minute")
    given = parser.parse_args()
    found = Found(seed=given.seed, seconds=given.seconds, without=given.without)
    with ExitStack() as stack:
        server = stack.enter_context(started(given.without))
        asyncio.run(soak(server, found, given.state))
        if found.failures:
            kept = Path(tempfile.mkdtemp(prefix="soak-log-")) / "log"
            shutil.copy(server.log, kept)
            found.failures.append(f"the log of the server is `{kept}`")
    found.is_done = True
    tally.save(found, given.state)
    print(report(found))
    return int(bool(found.failures))


if __name__ == "__main__":
    sys.exit(main())
