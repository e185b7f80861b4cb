"""Run a server at its limits for many turns, and compare the memory that it takes with the plan."""

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from exl2flow.cli.output.console import say, show, tell
from exl2flow.cli.output.tables import table_of
from exl2flow.cli.work.gpus import probe_driver
from exl2flow.cli.work.machine import memory_of
from exl2flow.cli.work.own_server import HOST, serving
from exl2flow.core import words
from exl2flow.core.errors import ServerFailed
from exl2flow.core.options.serving import ServeOptions, SoakOptions
from exl2flow.kernels import resolve_device
from exl2flow.model.memory.plan import MemoryPlan, plan_of

HOLDER = "exl2flow.cli.work.memory_holder"
KINDS = ("conversation", "conversation", "long prompt", "conversation", "cancelled")
SWAP = "swap"  # a turn of its own where there are several models
ANSWER = 32  # tokens of an answer at most, where the context has room for more
SHARE = 8  # turns in which a conversation fills its context
SECONDS = 3600.0  # without a byte from the server
WORDS = "seven red fish sleep while an old clock counts warm rain, slow trains and letters home"


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What came of one request: its seconds to the first token and between two, at most.

    tokens: of the prompt, as the server counted them; failure: why it failed; None: it did not.
    """

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    slowest: float = 0.0
    failure: str | None = None


@dataclass(slots=True)
class SoakResult:
    """What a server went through; memory in bytes, times in seconds, by kind of turn.

    planned: memory by the plan; None: there is none for this device.
    """

    device: str
    turns: int = 0
    peak: int = 0
    planned: int | None = None
    requests: dict[str, int] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    slowest: dict[str, float] = field(default_factory=dict)
    longest_prompt: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        """Whether no turn failed."""
        return not self.failures

    @property
    def over_plan(self) -> float | None:
        """The peak over the plan."""
        return self.peak / self.planned if self.planned else None

    def note(self, kind: str, answers: Sequence[TurnResult]) -> None:
        """Add the answers of a turn."""
        self.turns += 1
        for one in answers:
            self.requests[kind] = self.requests.get(kind, 0) + 1
            self.first[kind] = max(self.first.get(kind, 0.0), one.first)
            self.slowest[kind] = max(self.slowest.get(kind, 0.0), one.slowest)
            self.longest_prompt = max(self.longest_prompt, one.tokens)
            if one.failure is not None:
                self.failures.append(f"turn {self.turns}, {kind}: {one.failure}")

    def to_json(self) -> dict[str, object]:
        """Return all of it."""
        return {**asdict(self), "over_plan": self.over_plan, "passed": self.has_passed}


def run_soak(
    model: Path,
    options: SoakOptions,
    server: ServeOptions,
    given: Sequence[str],
    *,
    is_quiet: bool = False,
) -> SoakResult:
    """Run a server through turns, until one fails.

    Args:
        model: the folder.
        options: turns and memory.
        server: its options.
        given: these, as words of `exl2flow serve`.
        is_quiet: say nothing of single turns.

    Raises:
        ServerFailed: it did not start, or memory cannot be held.
    """
    device = resolve_device(server.device)
    is_gpu, port = device.type == "cuda", _free_port()
    with _held(options.memory, device) if is_gpu and options.memory else nullcontext():
        before = _gpu_memory() if is_gpu else 0
        with serving(model, port, given) as process:
            client = Client(port)
            planned = _planned(model, client, server) if is_gpu else None
            verdict = SoakResult(device=str(device), planned=planned)
            for turn in range(options.turns):
                kind = client.kinds[turn % len(client.kinds)]
                verdict.note(kind, client.turn(kind, turn))
                taken = _gpu_memory() - before if is_gpu else memory_of(process.pid)
                verdict.peak = max(verdict.peak, taken)
                if not is_quiet:
                    peak = words.size(verdict.peak)
                    say(f"turn {turn + 1} of {options.turns}: {kind}, peak {peak}", style="dim")
                if verdict.failures:
                    break
    return verdict


class Client:
    """Talks to a server: as many conversations as it has slots."""

    def __init__(self, port: int) -> None:
        self._port, self._random = port, random.Random(0)
        status = self._told("/v1/status")
        self.slots, self.room = int(status["slots"]), int(status["max_model_len"])
        self.pages = int(status["cache_pages"])
        share = min(self.room, self.pages * 256 // self.slots)  # of a conversation
        self.answer = max(1, min(ANSWER, share // 4))
        self._share, self._texts = share, [""] * self.slots
        self._models = [str(row["id"]) for row in self._told("/v1/models")["data"]]
        self.kinds = (*KINDS, SWAP) if self._models[1:] else KINDS
        self._per_word = 4.0  # tokens, at most; the answers tell
        self._failed = [one for one in [self._counted(self._words(64))] if one.failure]

    def _told(self, path: str) -> dict[str, Any]:
        connection = HTTPConnection(HOST, self._port, timeout=SECONDS)
        try:
            connection.request("GET", path)
            found: dict[str, Any] = json.load(connection.getresponse())
            return found
        except (OSError, HTTPException, ValueError) as error:
            raise ServerFailed(f"the server does not answer `{path}`: {error}") from error
        finally:
            connection.close()

    def turn(self, kind: str, turn: int) -> list[TurnResult]:
        """Run a turn; the conversations continue together."""
        failed, self._failed = self._failed, []
        if failed:
            return failed
        if kind == "conversation":
            with ThreadPoolExecutor(self.slots) as pool:
                return [*pool.map(self._continue, range(self.slots))]
        if kind == SWAP:
            names = [*self._models[1:], self._models[0]]
            return [self.ask(self._words(32), self.answer, model=name) for name in names]
        prompt = f"{turn} " + self._words(self._count(self.room - self.answer) - 1)
        if kind == "cancelled":
            return [self.ask(prompt, self.answer, leaves=True)]
        return [self._counted(prompt)]

    def _counted(self, prompt: str) -> TurnResult:
        """Ask, and note how many tokens words have."""
        found = self.ask(prompt, self.answer)
        if found.tokens:
            self._per_word = max(1.0, found.tokens / len(prompt.split()))
        return found

    def _continue(self, slot: int) -> TurnResult:
        """Let a conversation grow; it begins anew when its share of the cache is full."""
        more = self._words(self._count(self._share // SHARE))
        text = f"{self._texts[slot]} {more}".strip()
        if len(text.split()) > self._count(self._share - self.answer):
            text = more
        found = self.ask(text, self.answer)
        self._texts[slot] = text + found.text
        return found

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS.split(), k=max(1, count)))

    def _count(self, tokens: int) -> int:
        """Return how many words have at most so many tokens."""
        return int(0.97 * tokens / self._per_word)

    def ask(
        self, prompt: str, tokens: int, *, leaves: bool = False, model: str | None = None
    ) -> TurnResult:
        """Return what a prompt is continued with; leaves: stop reading after the first token."""
        body = {
            "model": model or self._models[0],
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        connection, begun = HTTPConnection(HOST, self._port, timeout=SECONDS), time.monotonic()
        headers = {"content-type": "application/json"}
        text, counted, times = "", 0, [begun]
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            for event in _events(connection):
                if "error" in event:
                    return TurnResult(failure=str(event["error"].get("message", event["error"])))
                counted = (event.get("usage") or {}).get("prompt_tokens", counted)
                if event.get("choices"):
                    text += event["choices"][0]["text"]
                    times.append(time.monotonic())
                    if leaves:
                        break
        except (OSError, HTTPException, ValueError) as error:
            return TurnResult(failure=words.cause(error) or type(error).__name__)
        finally:
            connection.close()
        first, *gaps = [after - before for before, after in pairwise(times)] or [0.0]
        return TurnResult(text, counted, first, max(gaps, default=0.0))


def _events(connection: HTTPConnection) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream, or the error that came instead."""
    response = connection.getresponse()
    if response.status != 200:
        yield json.load(response)
        return
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)


def _planned(model: Path, client: Client, options: ServeOptions) -> int:
    """Return the memory that a server takes by the plan."""
    plan: MemoryPlan = plan_of(
        model,
        context=client.room,
        tokens=client.pages * 256,
        cache_format=options.cache or "fp16",
        sequences=client.slots,
        embedding=options.embedding,
        drafts=options.draft in (None, "mtp"),
    )
    return plan.total


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _gpu_memory() -> int:
    """Return the bytes of all GPUs that are in use.

    Raises:
        ServerFailed: the driver does not tell.
    """
    driver, cards = probe_driver()
    if not cards:
        raise ServerFailed(
            f"the memory of the GPU is unknown: {driver.problem or 'no `nvidia-smi`'}"
        )
    return sum((card.total or 0) - (card.free or 0) for card in cards)


@contextmanager
def _held(left: int, device: torch.device) -> Iterator[None]:
    """Leave so many bytes of a GPU to others during the block."""
    command = [sys.executable, "-P", "-m", HOLDER, str(int(left)), str(device)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise ServerFailed("memory of the GPU cannot be held; is there as much as `--memory`?")
        yield
        process.communicate()


def show_soak(verdict: SoakResult) -> None:
    """Print what a server went through."""
    rows = [
        {
            "turn": kind,
            "requests": str(count),
            "first token, s": f"{verdict.first[kind]:.2f}",
            "slowest token, ms": f"{1e3 * verdict.slowest[kind]:.0f}",
        }
        for kind, count in verdict.requests.items()
    ]
    show(
        table_of(rows, f"{verdict.turns} turns, prompts of up to {verdict.longest_prompt:,} tokens")
    )
    memory = f"peak {words.size(verdict.peak)}"
    if verdict.planned is not None and verdict.over_plan is not None:
        memory += f", planned {words.size(verdict.planned)} ({verdict.over_plan:.1%} of it)"
    tell(f"{memory} on {verdict.device}")
    for failure in verdict.failures:
        tell(failure, style="red")
    tell("passed" if verdict.has_passed else "failed", style="" if verdict.has_passed else "red")
