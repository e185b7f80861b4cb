"""Faults at every call of small commands: `python campaigns/faults.py`.

- files: the n-th operation of a stage fails, for every n, with every error that fits it
- memory: torch's n-th allocation fails, as on a GPU or as on the CPU
- the Hub: the n-th request is refused, cut off, or answered slowly

A command with a fault must end well, or with an error that says what to do; nothing that was
committed is lost; and once the fault is over the same command ends with the bytes of an undisturbed
run. A failure prints what to pass to `--replay`.
"""

import argparse
import errno
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))

import checkout  # noqa: F401  # finds the package in a bare checkout
import commands
import pytest
import torch
from commands import TUNED, Command, conversion, differing, problem_of, quietly
from file_layer import CUT, FOLDER, KINDS, MAKE, OPEN, REMOVE, RENAME, SYNC, WRITE, Layer
from hub_requests import Request
from hub_server import Fault, Hub
from huggingface_hub import constants
from power_cuts import Tree, content_times, lay_out, tree_of
from state import HELP, State
from torch.utils._python_dispatch import TorchDispatchMode

from exl2flow.core.errors import Exl2FlowError
from exl2flow.core.store.store import StageFolder
from exl2flow.pipeline.local import run_locally
from exl2flow.pipeline.stages import STAGES

MEMORY = Path("/dev/shm")
LASTING = ("ENOSPC",)  # until the command has ended; others strike once
FILE_FAULTS: dict[str, tuple[str, ...]] = {
    "ENOSPC": (MAKE, WRITE, SYNC, RENAME, FOLDER, CUT),
    "EIO": KINDS,
    "EINTR": KINDS,
    "EMFILE": (OPEN, MAKE),
    "EACCES": (OPEN, MAKE, RENAME, REMOVE, FOLDER),
    "short": (WRITE,),
}
MEMORY_FAULTS: dict[str, Exception] = {
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 2097152 bytes. Error code 12 (Cannot allocate memory)"
    ),
}
HUB_FAULTS: dict[str, dict[str, Any]] = {
    "reset": {"kind": "cut"},
    "lost answer": {"kind": "lose"},
    "429": {"kind": "status", "status": 429, "headers": {"Retry-After": "0"}},
    "500": {"kind": "status", "status": 500},
    "truncated": {"kind": "cut", "after": 40},
    "slow": {"kind": "slow", "seconds": 0.3},
    "stalled": {"kind": "slow", "seconds": 2.5},
}
PATIENCE = 1.0  # seconds that the client waits, so that a stalled body is too slow


@dataclass
class Count:
    """What became of the faults of one kind; `system`: named by the command line's last resort."""

    faults: int = 0
    endured: int = 0
    named: int = 0
    system: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


Disturb = Callable[[int, str], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A command to disturb: the disk that it begins with, and what it leaves undisturbed.

    later: how many others follow.
    """

    name: str
    command: Command
    tree: Tree
    repos: dict[str, Any]
    wanted: dict[str, object]
    later: int = 0

    def begin(self) -> None:
        """Lay out the disk, and the Hub."""
        lay_out(self.tree, self.command.disk)
        if (hub := self.command.hub) is not None:
            hub.repos = deepcopy(self.repos)
            kept = {
                e["sha256"]
                for r in hub.repos.values()
                for c in r["commits"].values()
                for e in c.values()
            }
            for path in hub.path_of("x").parent.iterdir():
                if path.name not in kept:
                    path.unlink()

    def attempt(self, disturbed: AbstractContextManager[object], count: Count) -> str | None:
        """Run with a fault and again without; return what is wrong."""
        self.begin()
        count.faults += 1
        with content_times():
            with committing() as committed:
                try:
                    with disturbed:
                        self.command.run()
                    count.endured += 1
                except Exception as error:
                    if (message := problem_of(error)) is None:
                        return f"no named error: {error!r}"
                    is_ours = isinstance(error, Exl2FlowError)
                    count.named += is_ours
                    count.system += not is_ours
                    shown = f"after `{message}`"
                else:
                    shown = "after it ended well"
            if (lost := _lost(committed)) is not None:
                return f"lost `{lost}` {shown}"
            try:
                self.command.run()
            except Exception as error:
                return f"cannot be repeated {shown}: {error!r}"
        others = differing(self.command.results(), self.wanted)
        return f"{others[:6]} differ {shown}" if others else None


@contextmanager
def committing() -> Iterator[dict[Path, tuple[int, set[str]]]]:
    """Yield folder of a stage → cursor and files of the last commit that ended well."""
    save = StageFolder.save
    committed: dict[Path, tuple[int, set[str]]] = {}

    def noted(folder: StageFolder) -> None:
        save(folder)
        committed[folder.path] = folder.manifest.cursor, set(folder.manifest.files)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageFolder, "save", noted)
        yield committed


def _lost(committed: Mapping[Path, tuple[int, set[str]]]) -> str | None:
    """Return a committed result that is not there; one that a later commit dropped may be gone."""
    for path, (cursor, names) in committed.items():
        found = StageFolder.load(path)
        if found is None or found.manifest.cursor < cursor:
            return path.name
        for name in names & found.manifest.files.keys():
            if not found.valid(name) and not name.startswith("inputs/"):  # being removed
                return f"{path.name}/{name}"
    return None


class Faulty(Layer):
    """Fails the n-th call on a file; with `at` 0 it only lists the calls."""

    def __init__(self, root: Path, *, at: int = 0, fault: str = "") -> None:
        super().__init__(root)
        self.kinds: list[str] = []
        self._at, self._fault = at, fault

    def before(self, kind: str, path: str, size: int = 0) -> int:
        with self.lock:
            self.kinds.append(kind)
            number = len(self.kinds)
        is_later = self._fault in LASTING and kind in FILE_FAULTS[self._fault]
        if number != self._at and not (0 < self._at < number and is_later):
            return size
        if self._fault == "short":
            return max(size // 2, 1)
        code = getattr(errno, self._fault)
        raise OSError(code, os.strerror(code), path)


class Allocations(TorchDispatchMode):
    """Fails the n-th operation of torch that returns a new tensor; with `at` 0 it only counts."""

    def __init__(self, *, at: int = 0, fault: str = "cpu") -> None:
        super().__init__()
        self.count, self._at, self._fault = 0, at, fault

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not func.is_view and not func._schema.is_mutable:
            self.count += 1
            if self.count == self._at:
                raise MEMORY_FAULTS[self._fault]
        return func(*args, **(kwargs or {}))


@contextmanager
def failing_request(hub: Hub, at: int, fault: str) -> Iterator[list[str]]:
    """Let the n-th request to a Hub fail; yield the requests. With `at` 0 none fails."""
    requests: list[str] = []
    lock = threading.Lock()

    def strike(request: Request) -> Fault | None:
        with lock:
            requests.append(f"{request.method} {request.path}")
            return Fault(where="", **HUB_FAULTS[fault]) if len(requests) == at else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "fault", strike)
        patch.setattr(commands, "TIMEOUT_SECONDS", PATIENCE)
        patch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", PATIENCE)
        patch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", PATIENCE)
        yield requests


def stages(root: Path) -> Iterator[Subject]:
    """Yield the stages of a conversion one by one: the command that stops after each of them."""
    command, config = conversion(root, quality="best", tune=TUNED)
    command.disk.mkdir()
    numbers = [index for index, stage in enumerate(STAGES) if stage.enabled(config)]
    for later, index in zip(reversed(range(len(numbers))), numbers, strict=True):
        stage = STAGES[index]
        run = partial(run_locally, config, stages=STAGES[: index + 1])
        before = tree_of(command.disk)
        with content_times():
            run()
        after = tree_of(command.disk)
        one = Command(disk=command.disk, run=run)
        wanted = one.results()
        yield Subject(
            name=stage.name, command=one, tree=before, repos={}, wanted=wanted, later=later
        )
        lay_out(after, command.disk)


def publication(command: Command) -> Subject:
    """Return the fetching and publishing of a model."""
    assert command.hub is not None
    repos, before = deepcopy(command.hub.repos), tree_of(command.disk)
    with content_times():
        command.run()
    return Subject(
        name="publish", command=command, tree=before, repos=repos, wanted=command.results()
    )


def file_faults(subject: Subject) -> tuple[list[tuple[int, str]], Disturb]:
    """Return the faults of all operations on files, and what brings them about."""
    root = subject.command.disk
    subject.begin()
    seen = Faulty(root)
    with content_times(), seen.watching():
        subject.command.run()
    found = [
        (number, fault)
        for number, kind in enumerate(seen.kinds, 1)
        for fault, kinds in FILE_FAULTS.items()
        if kind in kinds
    ]
    return found, lambda at, fault: Faulty(root, at=at, fault=fault).watching()


def memory_faults(subject: Subject) -> tuple[list[tuple[int, str]], Disturb]:
    """Return the faults of all allocations, and what brings them about."""
    subject.begin()
    seen = Allocations()
    with content_times(), seen:
        subject.command.run()
    found = [(number, fault) for number in range(1, seen.count + 1) for fault in MEMORY_FAULTS]
    return found, lambda at, fault: Allocations(at=at, fault=fault)


def hub_faults(subject: Subject) -> tuple[list[tuple[int, str]], Disturb]:
    """Return the faults of all requests, and what brings them about."""
    hub = subject.command.hub
    assert hub is not None
    subject.begin()
    with content_times(), failing_request(hub, 0, "") as requests:
        subject.command.run()
    found = [(number, fault) for number in range(1, len(requests) + 1) for fault in HUB_FAULTS]
    return found, lambda at, fault: failing_request(hub, at, fault)


KINDS_OF_FAULTS = {"files": file_faults, "memory": memory_faults, "hub": hub_faults}


def rank(*words: object) -> int:
    """Return a fault's place in the order in which a seed draws them: a number of 48 bits.

    So the order of the others stays if the code changes and a command makes other calls.
    """
    return int.from_bytes(sha256("/".join(map(str, words)).encode()).digest()[:6], "big")


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """How many faults to try: all, or of each subject so many drawn from the seed.

    among: names of the subjects to disturb; empty: all.
    """

    seed: int = 0
    among: tuple[str, ...] = ()
    most: Mapping[str, int] = field(default_factory=dict)
    deadline: float = float("inf")
    only: str | None = None  # a failure to replay, as KIND:SUBJECT:NUMBER:FAULT
    state: State = field(default_factory=lambda: State(program="faults", seed=0))

    def run(self, folder: Path, kinds: list[str]) -> dict[str, Count]:
        """Try the faults of these kinds; return name of a fault → what became of it."""
        counts: dict[str, Count] = {}
        of_stages, of_publication = ([k for k in kinds if k != no] for no in ("hub", "memory"))
        with quietly():
            for subject in stages(folder / "conversion") if of_stages else ():
                if time.monotonic() > self.deadline:
                    break
                later = len(of_stages) * subject.later + len(of_publication)
                self._disturb(subject, of_stages, later, counts)
            if of_publication and time.monotonic() < self.deadline:
                (folder / "publish").mkdir()
                with commands.published(folder / "publish") as command:
                    command.disk.mkdir()
                    self._disturb(publication(command), of_publication, 0, counts)
        return counts

    def _disturb(
        self, subject: Subject, kinds: list[str], later: int, counts: dict[str, Count]
    ) -> None:
        """Try the faults of a subject; `later` other parts get equal shares of the time."""
        if self.among and subject.name not in self.among:
            return
        for index, kind in enumerate(kinds):
            now = time.monotonic()
            end = now + (self.deadline - now) / (later + len(kinds) - index)
            found, disturb = KINDS_OF_FAULTS[kind](subject)
            part = f"{kind}:{subject.name}"
            after = self.state.begin(part)
            ranked = sorted((rank(self.seed, part, *fault), *fault) for fault in found)
            if self.only is None:
                ranked = [each for each in ranked[: self.most.get(kind)] if each[0] >= after]
            for place, number, fault in ranked:
                name = f"{part}:{number}:{fault}"
                if time.monotonic() > end:
                    break
                if self.only in (None, name):
                    count = counts.setdefault(f"{kind}: {fault}", Count())
                    self._attempt(subject, name, disturb(number, fault), count, place)

    def _attempt(
        self,
        subject: Subject,
        name: str,
        disturbed: AbstractContextManager[object],
        count: Count,
        place: int,
    ) -> None:
        """Try a fault and count it."""
        kind, stage, _, fault = name.split(":")
        begun, one = time.monotonic(), Count()
        problem = subject.attempt(disturbed, one)
        one.seconds = time.monotonic() - begun
        failures = {} if problem is None else {f"--replay '{name}'": problem}
        count.failures += [f"{case}: {what}" for case, what in failures.items()]
        counts = {key: getattr(one, key) for key in ("endured", "named", "system", "seconds")}
        for key, value in {**counts, "faults": 1}.items():
            setattr(count, key, getattr(count, key) + value)
        self.state.add(
            f"{kind}: {fault}",
            part=f"{kind}:{stage}",
            after=place + 1,
            failures=failures,
            counts=counts,
        )
        self.state.save()


def main() -> int:
    """Run the campaign; return 1 if a fault was not mended."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", action="append", choices=KINDS_OF_FAULTS, help="default: all")
    parser.add_argument("--files", type=int, help="faults of files per stage; default: all")
    parser.add_argument("--memory", type=int, default=60, help="faults of memory per stage")
    parser.add_argument("--seconds", type=float, default=3600.0, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", help="KIND:STAGE:NUMBER:FAULT of a failure")
    parser.add_argument("--state", type=Path, help=HELP)
    given = parser.parse_args()
    most = {"memory": given.memory} | ({"files": given.files} if given.files else {})
    kinds = given.kind or list(KINDS_OF_FAULTS)
    if given.replay:
        kinds = [given.replay.partition(":")[0]]
    if given.replay and given.state:
        parser.error("--replay repeats a failure: give it without --state")
    state = State.opened("faults", path=given.state, seed=given.seed)
    work = Campaign(
        seed=given.seed,
        most=most,
        deadline=time.monotonic() + given.seconds,
        only=given.replay,
        state=state,
    )
    place = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="faults-", dir=place) as folder:
        work.run(Path(folder), kinds)
    return state.finish("fault")


if __name__ == "__main__":
    sys.exit(main())
