"""Kill a server that keeps prompts on disk, damage its pages, and start it again; compare texts.

    python campaigns/restarts.py --restarts 200 --seed 1 --state restarts.json

Clients send some of a fixed set of prompts, whose greedy texts a server without pages on disk has
told. At a random moment, while the server starts, reads or writes pages as well, it gets SIGKILL or
SIGTERM, or one behind the other. Every complete answer must have the known text.

A restart takes a fork of a process that has imported everything, and there runs the command line
as `exl2flow serve`: imports would take most of the time.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))

import httpx
import tally
from leftovers import end_with_this_process
from serving import BEGIN, DEMO, START_SECONDS
from signals import KILLED, TERMINATED
from sources import ROOT

IMPORTED = [
    "__main__",
    "exl2flow.cli.commands.serve",
    "exl2flow.serve.http.app",
    "exl2flow.inference",
]
FLAGS = ("--device", "cpu", "--port", "0", "--tokens", "3072", "--slots", "4", "--drain", "5")
SIZE = 20_000_000  # bytes of pages
CLIENTS, PROMPTS, STEMS = 4, 12, 3
NEW_TOKENS = 12
STEM, END = 2600, 1000  # characters
WORK_SECONDS, END_SECONDS = 3.0, 0.5  # before a signal, between two
GONE_SECONDS = 60.0
POLL_SECONDS = 0.01
EARLY, DAMAGED = 0.15, 0.4  # of the restarts
WANTED = 0.25  # of the restarts with answers found pages on disk
BOTH = "both"  # SIGTERM, then SIGKILL
STARTS, ANSWERS, TEXTS = "starts", "is answered until the signal", "texts"
CODE, FOUND = "SIGTERM ends with 0", "pages found again"
CHECKS = (STARTS, ANSWERS, TEXTS, CODE, FOUND)


def serve(words: list[str], log: Path) -> None:
    """Run the command line in this process, which is a fork."""
    from exl2flow.cli.main import main

    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["exl2flow", "serve", str(DEMO), *FLAGS, *words]
    main()


@dataclass(frozen=True, slots=True)
class Server:
    """A server in a process of its own."""

    process: ForkServerProcess
    log: Path

    @property
    def lines(self) -> list[str]:
        """The log."""
        return self.log.read_text("utf-8", "replace").splitlines() if self.log.exists() else []

    def url(self) -> str:
        """Return the address once it is served; nothing if the process ends before."""
        deadline = time.monotonic() + START_SECONDS
        while self.process.is_alive() and time.monotonic() < deadline:
            for line in self.lines:
                if line.startswith(BEGIN):
                    return line.removeprefix(BEGIN).removesuffix("/v1")
            time.sleep(POLL_SECONDS)
        return ""

    def end(self, kind: str, rng: random.Random) -> int | None:
        """Send signals; return the exit code, None if the process does not end."""
        pid = self.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL if kind == KILLED else signal.SIGTERM)
        if kind == BOTH:
            self.process.join(rng.uniform(0, END_SECONDS))
            self.process.kill()
        self.process.join(GONE_SECONDS)
        return self.process.exitcode


@contextmanager
def started(folder: Path, *words: str) -> Iterator[Server]:
    """Start a server; behind the block it is gone."""
    context, log = get_context("forkserver"), folder / "log"
    log.unlink(missing_ok=True)
    process = context.Process(target=serve, args=([*words], log))
    process.start()
    try:
        yield Server(process, log)
    finally:
        process.kill()
        process.join()


def prompts(rng: random.Random) -> list[str]:
    """Return prompts of some hundred tokens; several begin alike."""
    text = (ROOT / "demo" / "heldout.txt").read_text(encoding="utf-8")
    starts = [rng.randrange(len(text) - STEM) for _ in range(STEMS)]
    ends = [rng.randrange(len(text) - END) for _ in range(PROMPTS)]
    stems = [text[start : start + STEM] for start in starts]
    return [
        stems[i % STEMS] + text[end : end + rng.randrange(1, END)] for i, end in enumerate(ends)
    ]


def asked(http: httpx.Client, prompt: str) -> httpx.Response:
    """Return the answer to a prompt, the likeliest tokens."""
    body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    return http.post("/v1/completions", json=body)


def known(folder: Path, given: list[str]) -> list[str]:
    """Return the texts of a server that keeps nothing on disk."""
    with started(folder) as server, httpx.Client(base_url=server.url(), timeout=60) as http:
        return [asked(http, prompt).json()["choices"][0]["text"] for prompt in given]


@dataclass(slots=True)
class Found:
    """What the restarts have shown so far; it is the state file.

    next: number of the next restart. signals, damages: by kind. deleted: pages that the server
    found to be wrong. with_answers, with_hits: restarts.
    """

    seed: int
    next: int = 0
    answers: int = 0
    deleted: int = 0
    with_answers: int = 0
    with_hits: int = 0
    signals: Counter[str] = field(default_factory=Counter)
    damages: Counter[str] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path | None, seed: int) -> "Found":
        """Return what a state file has of this seed, or nothing yet."""
        if path is None or not path.exists():
            return cls(seed)
        values = json.loads(path.read_bytes())
        if values["seed"] != seed:
            raise SystemExit(f"`{path}` is of seed {values['seed']}; give --seed or another file")
        counted = {n: Counter(v) if isinstance(v, dict) else v for n, v in values.items()}
        return cls(**counted)

    def check(self, name: str, problem: object) -> None:
        """Count a check of the current restart, and note what is wrong."""
        self.tried[name] += 1
        if problem:
            self.failed[name] += 1
            self.failures.append(f"{name} in restart {self.next}: {problem}")
            print(f"FAILED {self.failures[-1]}", file=sys.stderr, flush=True)


def _truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _foreign(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(path.stat().st_size))


def _swapped(path: Path, rng: random.Random) -> None:
    others = sorted(one for one in path.parents[1].glob("*/*.page") if one.is_file())
    path.write_bytes(rng.choice(others).read_bytes())


def _folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _stranger(path: Path, rng: random.Random) -> None:
    path.with_name(rng.choice(["notes.txt", "00.page", "x.partial"])).write_bytes(b"what?")


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "truncated": _truncate,
    "bit flipped": _flip,
    "other bytes": _foreign,
    "another page": _swapped,
    "a folder": _folder,
    "foreign file beside": _stranger,
}


def damage(folder: Path, rng: random.Random, found: Found) -> None:
    """Damage some pages, half of them at most."""
    pages = sorted(path for path in folder.glob("*/*/*.page") if path.stat().st_size > 100)
    pages = [path for path in pages if path.is_file()]
    for path in rng.sample(pages, rng.randrange(len(pages) // 2 + 1)):
        kind = rng.choice(list(DAMAGES))
        DAMAGES[kind](path, rng)
        found.damages[kind] += 1


class Clients:
    """Threads that ask until they are told that the server ends; `answers`: number and text."""

    def __init__(self, url: str, given: list[str], rng: random.Random) -> None:
        """Begin."""
        self.answers: list[tuple[int, str]] = []
        self.problems: list[str] = []
        self._given, self._over = given, threading.Event()
        orders = [rng.sample(range(len(given)), len(given)) for _ in range(CLIENTS)]
        self._threads = [threading.Thread(target=self._ask, args=(url, one)) for one in orders]
        for thread in self._threads:
            thread.start()

    def expect_the_end(self) -> None:
        """Take errors as right from now on."""
        self._over.set()

    def join(self) -> None:
        """Wait until all have noticed."""
        for thread in self._threads:
            thread.join()

    def _ask(self, url: str, order: list[int]) -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            for number in order * 100:
                try:
                    answer = asked(http, self._given[number])
                except httpx.HTTPError as error:
                    if not self._over.is_set():
                        self.problems.append(repr(error))
                    return
                if answer.status_code != 200:
                    if not self._over.is_set():
                        self.problems.append(answer.text)
                    return
                self.answers.append((number, answer.json()["choices"][0]["text"]))


def hits_of(url: str) -> int:
    """Return the tokens that were found on disk."""
    status = httpx.get(f"{url}/v1/status", timeout=60).json()
    return int(status["cache"]["hits"]["disk"])


def restart(home: Path, given: list[str], texts: list[str], found: Found, seconds: float) -> None:
    """Start, ask, end. seconds: how long a start takes."""
    rng = random.Random(f"{found.seed}/{found.next}")
    folder = home / "pages"
    if rng.random() < DAMAGED:
        damage(folder, rng, found)
    size = rng.choice([SIZE, SIZE, SIZE // 2])
    kind = rng.choice([KILLED, TERMINATED, BOTH])
    is_early = rng.random() < EARLY
    moment = rng.uniform(0, seconds if is_early else WORK_SECONDS)
    with started(home, "--cache-disk", str(folder), "--cache-disk-size", str(size)) as server:
        url, clients = "", None
        if not is_early:
            url = server.url()
            found.check(STARTS, not url and server.lines[-20:])
            if not url:
                return
            clients = Clients(url, given, rng)
        time.sleep(moment)
        if clients is not None:
            hits = hits_of(url)
            found.with_hits += bool(hits)
            clients.expect_the_end()
        code = server.end(kind, rng)
        found.signals[f"{kind}{' early' * is_early}"] += 1
        allowed = {KILLED: (-9,), TERMINATED: (0,), BOTH: (-9, 0)}[kind]
        early = (143, -signal.SIGTERM) if is_early and kind != KILLED else ()
        wrong = code not in (*allowed, *early) and f"{kind}, {code}: {server.lines[-20:]}"
        found.check(CODE, wrong)
        found.deleted += sum("is damaged or not ours" in line for line in server.lines)
        if clients is not None:
            clients.join()
            judge(clients, texts, found)


def judge(clients: Clients, texts: list[str], found: Found) -> None:
    """Compare the answers of a restart with the known texts."""
    found.check(ANSWERS, clients.problems)
    found.with_answers += bool(clients.answers)
    for number, text in clients.answers:
        found.answers += 1
        found.check(TEXTS, text != texts[number] and f"prompt {number}: {text!r}")


def campaign(given: argparse.Namespace, found: Found, home: Path) -> None:
    """Restart until there were enough, or the time is over."""
    deadline = time.monotonic() + given.seconds
    asked_for = prompts(random.Random(found.seed))
    texts = known(home, asked_for)
    begun = time.monotonic()
    with started(home) as server:
        assert server.url(), server.lines
    seconds = time.monotonic() - begun
    while found.next < given.restarts and time.monotonic() < deadline:
        restart(home, asked_for, texts, found, seconds)
        found.next += 1
        tally.save(found, given.state)
        if found.next % 20 == 0:
            print(f"{found.next} restarts, {found.failed.total()} failures", flush=True)
    if found.next >= given.restarts:
        share = found.with_hits / max(1, found.with_answers)
        found.check(FOUND, share < WANTED and f"only in {share:.0%} of the restarts")


def report(found: Found) -> str:
    """Return the table of all restarts so far."""
    lines = [
        f"seed {found.seed}: {found.next} restarts, {found.answers:,} answers; "
        f"{found.with_hits} of {found.with_answers} restarts with answers found pages on disk",
        f"signals: {', '.join(f'{kind} {n}' for kind, n in found.signals.most_common())}",
        f"damages: {', '.join(f'{kind} {n}' for kind, n in found.damages.most_common())}; "
        f"{found.deleted} damaged pages were found and deleted",
        "",
        tally.table("check", {name: found.tried[name] for name in CHECKS}, found.failed),
    ]
    return "\n".join([*lines, *(f"FAILED {one}" for one in found.failures)])


def main() -> int:
    """Run the campaign and print its table; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of this call at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, help="file of what was tried; another call goes on")
    given = parser.parse_args()
    found = Found.of(given.state, given.seed)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    end_with_this_process()
    get_context("forkserver").set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory(prefix="restarts-") as home:
        campaign(given, found, Path(home))
    tally.save(found, given.state)
    print(report(found))
    return int(bool(found.failures))


if __name__ == "__main__":
    sys.exit(main())
