"""Send hostile requests of every type beside running texts.

    python campaigns/hostile.py --count 1000 --seed 1

The server is `exl2flow serve` of a small model. Each type of request gets `--count` bodies at and
beyond its bounds, deep, long, of many values, or broken, drawn from a seed; meanwhile some clients
read streams. The gaps between the events of those streams are compared with those of a run without
hostile requests, of five minutes at most, in which the same bodies are drawn at the same times, as
that takes a processor: the 99th percentile may be three times as long, and the longest half a
second longer. The process must live, and hold no more memory than `--memory`.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))

import httpx
import psutil
from request_bounds import REQUESTS, bounds, names_of
from serving import DEMO, Served, serving

READERS, SENDERS = 4, 2  # clients
WARM_SECONDS = 5.0
ALONE_SECONDS = 300.0  # of the run without hostile requests, at most
PATIENCE_SECONDS = 120.0  # for an answer
MOST_TIMES, MOST_LONGER = 3.0, 0.5  # of the 99th percentile; seconds of the longest gap
MEMORY_SECONDS = 0.2  # between two looks
SHOWN = 8  # of the longest gaps
LETTERS = 'abc {}[]",:\\\n\t\x00é漢😀'
TEXT: dict[str, Any] = {"prompt": "The cat", "max_tokens": 400, "stream": True, "ignore_eos": True}
THOUGHT = {"type": "thinking", "thinking": "a"}
TURNS = ({"role": "user", "content": "a"}, {"role": "assistant", "content": [THOUGHT] * 50})
Body = bytes | Any  # JSON as it is sent, or a value


@dataclass(slots=True)
class Found:
    """What a run has shown: gaps and slowest answers in seconds, statuses, most bytes held.

    drawn: when each body was drawn, in seconds from the start, its path and seed; sent: of each
    request when it began and ended, and which it was; ends: when each gap ended.
    """

    gaps: list[float] = field(default_factory=list)
    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    slowest: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    memory: int = 0
    drawn: list[tuple[float, str, str]] = field(default_factory=list)
    sent: list[tuple[float, float, str]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    @property
    def tail(self) -> float:
        """The 99th percentile of the gaps."""
        return sorted(self.gaps)[int(len(self.gaps) * 0.99)]

    def longest(self) -> Iterator[str]:
        """Yield the longest gaps with the requests that were open in them."""
        for gap, end in sorted(zip(self.gaps, self.ends, strict=True), reverse=True)[:SHOWN]:
            beside = [name for begun, ended, name in self.sent if begun < end and ended > end - gap]
            yield f"{1e3 * gap:.0f} ms beside {', '.join(beside) or 'none'}"


def _beyond(path: str, rng: random.Random) -> Any:
    """Return a body with one or two fields beyond a bound."""
    model, least = REQUESTS[path]
    body = dict(least)
    for name in rng.sample([*model.model_fields], min(len(model.model_fields), rng.choice((1, 2)))):
        if found := bounds(model, name):
            body[rng.choice(names_of(model, name))] = rng.choice(found).beyond
    return body


def _at(path: str, rng: random.Random) -> Any:
    """Return a body with a field that is cut to its bound, or far below it."""
    model, least = REQUESTS[path]
    name = rng.choice([*model.model_fields])
    found = bounds(model, name)
    value = rng.choice(found).beyond if found else rng.choice((True, None))
    share = rng.choice((1.0, 0.5, 0.1))
    if isinstance(value, str | list):
        value = value[: int((len(value) - 1) * share)]
    elif isinstance(value, int | float):
        value = type(value)(value * share * 0.4)
    return {**least, rng.choice(names_of(model, name)): value}


def _size(rng: random.Random, sizes: Sequence[int]) -> int:
    """Return one of some sizes that rise; each is three times as rare as the one before."""
    return rng.choices(sizes, [3.0**-place for place in range(len(sizes))])[0]


def _deep(path: str, rng: random.Random) -> bytes:
    """Return lists or objects within each other, in a field or alone."""
    depth = _size(rng, (63, 66, 1000, 30_000, 1_000_000))
    opened, closed = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    core = opened * depth + b"1" + closed * depth * rng.choice((0, 1))
    name = rng.choice([*REQUESTS[path][0].model_fields, "x", "metadata"])
    return b'{"%s":%s}' % (name.encode(), core)


def _long(path: str, rng: random.Random) -> Any:
    """Return a body in which one text is long."""
    model, least = REQUESTS[path]
    text = "".join(rng.choices(LETTERS, k=50)) * _size(rng, (100, 4_000, 80_000))
    return {**least, rng.choice([*model.model_fields, "x"]): text}


def _many(path: str, rng: random.Random) -> Any:
    """Return a body in which one field has many elements of a kind."""
    model, least = REQUESTS[path]
    element = rng.choice((1, -1, 0.5, "a", None, [], {}, [1], *TURNS))
    count = _size(rng, (100, 3_000, 60_000, 500_000))
    count = min(count, (8 << 20) // (len(json.dumps(element)) + 2))
    name = rng.choice([*model.model_fields, "x"])
    if rng.random() < 0.2:
        return {**least, name: {str(number): element for number in range(min(count, 60_000))}}
    return {**least, name: [element] * count}


def _broken(path: str, rng: random.Random) -> bytes:
    """Return a body that is damaged, or no JSON."""
    data = bytearray(json.dumps(REQUESTS[path][1]).encode(rng.choice(("utf-8", "utf-16"))))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    marks = b'"' * _size(rng, (100, 4_000_000))
    texts = (marks, b"9" * 100_000, b"[" + b"9" * 4299 + b"]", b"\\ud800", b"")
    return rng.choice((bytes(data), bytes(data), *texts))


KINDS: tuple[Callable[[str, random.Random], Body], ...]
KINDS = (_beyond, _beyond, _at, _at, _deep, _long, _many, _many, _broken)


def drawn(path: str, rng: random.Random) -> bytes:
    """Return a hostile body; texts that it may ask for are short."""
    body = rng.choice(KINDS)(path, rng)
    if isinstance(body, dict) and "max_tokens" in REQUESTS[path][0].model_fields:
        limits = {"max_tokens", *names_of(REQUESTS[path][0], "max_tokens")}
        body = body if limits & body.keys() else {**body, "max_tokens": rng.randrange(1, 9)}
    return body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()


async def read(http: httpx.AsyncClient, found: Found, end: asyncio.Event, number: int) -> None:
    """Read one stream after the other, and keep the gaps between events of a text."""
    seed = number << 20
    while not end.is_set():
        seed += 1
        last = None
        async with http.stream("POST", "/v1/completions", json={**TEXT, "seed": seed}) as answer:
            if answer.status_code != 200:
                found.problems.append(
                    f"a text: {answer.status_code} {(await answer.aread())!r:.300}"
                )
                return
            async for line in answer.aiter_lines():
                if end.is_set():
                    return
                if line.startswith("data: {"):
                    now = time.monotonic()
                    found.gaps += [] if last is None else [now - last]
                    found.ends += [] if last is None else [now]
                    last = now
                    if '"error"' in line:
                        found.problems.append(f"a text: {line:.300}")


def _drawn(path: str, seed: str) -> bytes:
    return drawn(path, random.Random(seed))


def _drawing() -> Executor:
    """Return another process for `_drawn`: in this one it would hold up those who read."""
    return ProcessPoolExecutor(1, get_context("spawn"), os.nice, (10,))


async def send(
    http: httpx.AsyncClient,
    found: Found,
    work: "asyncio.Queue[tuple[str, int]]",
    seed: int,
    drawing: Executor,
) -> None:
    """Send hostile requests until none is left."""
    loop, start = asyncio.get_running_loop(), time.monotonic()
    while not work.empty():
        path, number = work.get_nowait()
        found.drawn.append((time.monotonic() - start, path, f"{seed}/{path}/{number}"))
        body = await loop.run_in_executor(drawing, _drawn, *found.drawn[-1][1:])
        began = time.monotonic()
        try:
            answer = await http.post(
                path, content=body, headers={"content-type": "application/json"}
            )
        except httpx.HTTPError as error:
            found.problems.append(f"{path} {number}: {error!r}")
            continue
        finally:
            found.sent.append((began, time.monotonic(), f"{path} {number}"))
        found.statuses.setdefault(path, Counter())[answer.status_code] += 1
        found.slowest[path] = max(found.slowest.get(path, 0.0), time.monotonic() - began)
        count = sum(each.total() for each in found.statuses.values())
        if count % 100 == 0 or count < 10:
            print(f"{count} sent, {len(found.problems)} problems", file=sys.stderr, flush=True)
        if answer.status_code >= 500 and answer.status_code != 503:
            found.problems.append(f"{path} {number}: {answer.status_code} {answer.text:.300}")


async def watch(process: psutil.Process, found: Found) -> None:
    """Keep the most memory that the server and its children hold."""
    while process.is_running():
        family = [process, *process.children(recursive=True)]
        held = 0
        for one in family:
            try:
                held += one.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        found.memory = max(found.memory, held)
        await asyncio.sleep(MEMORY_SECONDS)


async def run(server: Served, paths: Sequence[str], count: int, seed: int) -> tuple[Found, Found]:
    """Return a run with hostile requests, and one of the same length without."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=PATIENCE_SECONDS, limits=limits
    ) as http:
        warm = await _texts(server, http, lambda _: asyncio.sleep(WARM_SECONDS))
        if warm.problems:
            return warm, warm
        work: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        for number in range(count):
            for path in paths:
                work.put_nowait((path, number))

        async def attack(found: Found) -> None:
            with _drawing() as drawing:
                await asyncio.gather(
                    *(send(http, found, work, seed, drawing) for _ in range(SENDERS))
                )

        hostile = await _texts(server, http, attack)
        alone = await _texts(server, http, lambda _: draw_again(hostile.drawn))
        return hostile, alone


async def draw_again(drawn_at: Sequence[tuple[float, str, str]]) -> None:
    """Draw bodies at the same times as before, and send none."""
    loop, start = asyncio.get_running_loop(), time.monotonic()
    with _drawing() as drawing:
        for at, path, seed in drawn_at:
            if at > ALONE_SECONDS:
                return
            await asyncio.sleep(max(0.0, at - time.monotonic() + start))
            await loop.run_in_executor(drawing, _drawn, path, seed)


async def _texts(server: Served, http: httpx.AsyncClient, beside: Callable[[Found], Any]) -> Found:
    """Read streams while something else is done."""
    found, end = Found(), asyncio.Event()
    watching = asyncio.create_task(watch(psutil.Process(server.process.pid), found))
    readers = [asyncio.create_task(read(http, found, end, n)) for n in range(READERS)]
    await beside(found)
    end.set()
    for result in await asyncio.gather(*readers, return_exceptions=True):
        if isinstance(result, BaseException):
            found.problems.append(f"a text: {result!r}")
    watching.cancel()
    return found


def report(hostile: Found, alone: Found, most_memory: int) -> tuple[str, bool]:
    """Return the tables of a run, and whether it missed a bound."""
    lines = ["| request | sent | slowest, s | statuses |", "|---|---|---|---|"]
    for path, counts in sorted(hostile.statuses.items()):
        shown = ", ".join(f"{status}: {n:,}" for status, n in sorted(counts.items()))
        lines.append(f"| {path} | {counts.total():,} | {hostile.slowest[path]:.1f} | {shown} |")
    longest, alone_longest = max(hostile.gaps, default=0.0), max(alone.gaps, default=0.0)
    rows = (
        ("99 % of gaps, ms", hostile.tail, alone.tail, hostile.tail <= MOST_TIMES * alone.tail),
        ("longest gap, ms", longest, alone_longest, longest <= alone_longest + MOST_LONGER),
    )
    lines += ["", "| | with hostile requests | without | kept |", "|---|---|---|---|"]
    for name, seen, plain, is_kept in rows:
        lines.append(f"| {name} | {seen * 1e3:.0f} | {plain * 1e3:.0f} | {is_kept} |")
    fits = hostile.memory <= most_memory
    mib = (hostile.memory >> 20, alone.memory >> 20)
    lines.append(f"| most memory, MiB (bound {most_memory >> 20}) | {mib[0]} | {mib[1]} | {fits} |")
    lines += ["", *hostile.longest()]
    problems = [*hostile.problems, *alone.problems]
    lines += [f"FAILED {one}" for one in problems[:50]]
    return "\n".join(lines), bool(problems) or not (fits and all(row[3] for row in rows))


def main() -> int:
    """Run the campaign and print its tables; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="requests of each type")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[*REQUESTS], choices=REQUESTS)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", type=int, default=4096, help="MiB that the server may hold")
    given = parser.parse_args()
    flags = ("--format", "chatml", "--slots", "8", "--tokens", "16384", "--max-answer", "400")
    with serving("--device", given.device, *flags, model=given.model) as server:
        hostile, alone = asyncio.run(run(server, given.only, given.count, given.seed))
        code = server.process.exitcode
        if code is not None:
            hostile.problems.insert(0, f"the server ended with {code}")
        text, is_missed = report(hostile, alone, given.memory << 20)
        print(f"seed {given.seed}, {given.count} requests of each type\n\n{text}")
        if is_missed:
            print("\n".join(server.lines[-30:]))
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
