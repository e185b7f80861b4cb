"""Run a server at its limits for many turns, and compare the memory that it takes with the plan."""

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from exl2flow.cli.output.console import say, show, tell
from exl2flow.cli.output.tables import table_of
from exl2flow.cli.work.gpus import probe_driver
from exl2flow.cli.work.machine import memory_of
from exl2flow.cli.work.own_server import HOST, serving
from exl2flow.cli.work.soak_client import SoakClient, TurnResult
from exl2flow.core import words
from exl2flow.core.errors import ServerFailed
from exl2flow.core.options.serving import ServeOptions, SoakOptions
from exl2flow.kernels import resolve_device
from exl2flow.model.memory.plan import MemoryPlan, plan_of

HOLDER = "exl2flow.cli.work.memory_holder"


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
            client = SoakClient(port)
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


def _planned(model: Path, client: SoakClient, options: ServeOptions) -> int:
    """Return the memory that a server takes by the plan."""
    plan: MemoryPlan = plan_of(
        model,
        context=client.room,
        tokens=client.tokens,
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
