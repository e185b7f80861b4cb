"""Power cuts at every point of small commands: `python campaigns/crashes.py`.

A command is recorded once. A state is what a power cut after any of its events may leave: whatever
was not synced is lost, kept or torn. Each state is laid out as a folder, nothing that was committed
may be missing in it, and the same command must then end with the bytes of an undisturbed run. Of
every fourth state the resumed command is cut once more.

All states of the store are tried, and of whole commands as many as asked for. A failure prints
what to pass to `--replay`.
"""

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))

import checkout  # noqa: F401  # finds the package in a bare checkout
import pytest
from commands import NAMES, Command, Opened, differing, problem_of, quietly
from file_layer import REMOVE, RENAME
from hub_server import Hub
from power_cuts import LOCK, NOTE, Cut, Recording, Tree, content_times, lay_out
from state import HELP, State

from exl2flow.core.errors import Exl2FlowError
from exl2flow.core.store.store import MANIFEST, StageFolder

MEMORY = Path("/dev/shm")  # thousands of folders are laid out: not on a disk
TWICE = 4  # every so many states the resumed command is cut, too
EXHAUSTED = "toy"  # the store: all of its states are tried


@dataclass(frozen=True, kw_only=True)
class Committed:
    """What a stage has committed: its folder, its cursor, and the digests of its files."""

    folder: str
    cursor: int
    files: Mapping[str, str]


@dataclass
class Count:
    """What became of the states of one command."""

    events: int = 0
    drawn: int = 0
    resumed: int = 0
    same: int = 0
    named: int = 0
    failures: list[str] = field(default_factory=list)
    is_cut: bool = False  # whether time was over before all states were tried
    seconds: float = 0.0


class Trial:
    """A recorded command, and what an undisturbed run leaves."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.recording = self.recorded()
        self.wanted = command.results()
        self.known: set[str] = set()

    def recorded(self) -> Recording:
        """Run the command on the disk as it is, and return what it did.

        Raises:
            Exception: the command fails.
        """
        recording = Recording(self.command.disk)
        with recording.watching(), _notes(recording, self.command):
            self.command.run()
        return recording

    def begin(self, recording: Recording, cut: Cut, tree: Tree) -> None:
        """Lay out a state: the disk, and the Hub as it was at that time."""
        lay_out(tree, self.command.disk)
        if (hub := self.command.hub) is not None:
            notes = [e.value for e in recording.events[: cut.prefix + 1] if e.kind == NOTE]
            repos, objects = [note for note in notes if isinstance(note, tuple)][-1]
            hub.repos = deepcopy(repos)
            for name in _objects(hub) - objects:
                hub.path_of(name).unlink()

    def attempt(self, cut: Cut, draw: random.Random | None, count: Count) -> str | None:
        """Resume a state unless it was seen; return what is wrong. With `draw`, cut it twice."""
        count.drawn += 1
        return self._resume(self.recording, cut, draw, count)

    def skip(self, cut: Cut) -> None:
        """Remember a state that an earlier run of the campaign has tried."""
        self.known.add(_identity(cut, self.recording.left(cut), self.command.hub))

    def _resume(
        self, recording: Recording, cut: Cut, draw: random.Random | None, count: Count
    ) -> str | None:
        tree = recording.left(cut)
        where = recording.described(cut)
        if (missing := lost_commits(recording, cut, tree)) is not None:
            return f"lost {missing} {where}"
        if recording is self.recording:  # those of a resumed command begin with other files
            if (seen := _identity(cut, tree, self.command.hub)) in self.known and draw is None:
                return None
            self.known.add(seen)
        self.begin(recording, cut, tree)
        count.resumed += 1
        try:
            with content_times():
                again = self.recorded() if draw else self.command.run()
        except Exception as error:
            message = problem_of(error)
            count.named += isinstance(error, Exl2FlowError)
            return f"{message or repr(error)} {where}"
        if others := differing(self.command.results(), self.wanted):
            return f"{others[:6]} differ {where}"
        count.same += 1
        if draw and isinstance(again, Recording):
            second = self._resume(again, again.drawn(draw), None, count)
            return second and f"{second}, which was resumed {where}"
        return None


def _objects(hub: Hub | None) -> frozenset[str]:
    return frozenset(p.name for p in hub.path_of("x").parent.iterdir()) if hub else frozenset()


def _identity(cut: Cut, tree: Tree, hub: Hub | None) -> str:
    """Return a digest of a state; states of a Hub differ by the point in time, too."""
    sha = hashlib.sha256(str(cut.prefix if hub else 0).encode())
    for name, content in sorted(tree.items()):
        is_lock = LOCK in name
        sha.update(f"{name} {content and not is_lock and content[1]} ".encode())
        sha.update(b"" if content is None or is_lock else content[0])
    return sha.hexdigest()


@contextmanager
def _notes(recording: Recording, command: Command) -> Iterator[None]:
    """Remember each commit when it is done, and the Hub after each answer that changes it."""
    save = StageFolder.save

    def noted(folder: StageFolder) -> None:
        save(folder)
        name = str(folder.path.relative_to(recording.root))
        files = {n: str(r.sha256) for n, r in folder.manifest.files.items()}
        recording.note(Committed(folder=name, cursor=folder.manifest.cursor, files=files))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageFolder, "save", noted)
        if (hub := command.hub) is not None:
            recording.note((deepcopy(hub.repos), _objects(hub)))
            patch.setattr(hub, "save", _noting(hub, hub.save, recording))
            patch.setattr(hub, "store", _noting(hub, hub.store, recording))
        yield


def _noting(hub: Hub, change: Callable[..., Any], recording: Recording) -> Callable[..., Any]:
    def changed(*arguments: Any) -> Any:
        result = change(*arguments)
        if all(repo["commits"] for repo in hub.repos.values()):  # the others are being made
            recording.note((deepcopy(hub.repos), _objects(hub)))
        return result

    return changed


def lost_commits(recording: Recording, cut: Cut, tree: Tree) -> str | None:
    """Return which committed result is missing in a state, None if all are there."""
    last: dict[str, tuple[int, Committed]] = {}
    for index, event in enumerate(recording.events[: cut.prefix]):
        if event.kind == NOTE and isinstance(event.value, Committed):
            last[event.value.folder] = index, event.value
    for index, committed in last.values():
        later = recording.events[index : cut.prefix]
        changed = {event.path for event in later if event.kind in (REMOVE, RENAME)}
        changed |= {event.value for event in later if event.kind == RENAME}

        def is_changed(name: str, changed: set[str] = changed) -> bool:
            return any(part in changed for part in (name, *map(str, Path(name).parents)))

        manifest = f"{committed.folder}/{MANIFEST}"
        if (content := tree.get(manifest)) is None:
            if not is_changed(committed.folder):
                return f"`{manifest}`"
        elif json.loads(content[0])["cursor"] < committed.cursor:
            return f"progress in `{manifest}`"
        for name, sha256 in committed.files.items():
            path = Path(recording.root, committed.folder, name)
            if not path.is_relative_to(recording.root):
                continue
            own = str(path.relative_to(recording.root))
            found = tree.get(own)
            if not is_changed(own) and (
                found is None
                or (sha256 != "None" and hashlib.sha256(found[0]).hexdigest() != sha256)
            ):
                return f"`{own}`"
    return None


@dataclass(frozen=True, kw_only=True)
class Part:
    """The states of one command to try: their numbers, and until when."""

    name: str
    seed: int
    numbers: range
    deadline: float
    state: State

    def run(self, command: Command, count: Count) -> None:
        """Try every state of the store; of other commands, the states that the seed draws."""
        trial = Trial(command)
        count.events = len(trial.recording.events)
        every = list(trial.recording.every()) if self.name == EXHAUSTED else None
        numbers = self.numbers if every is None else range(len(every))
        after = max(
            numbers.start,
            self.state.begin(self.name, total=None if every is None else len(every)),
        )
        for number in numbers:
            if time.monotonic() > self.deadline:
                count.is_cut = True
                return
            draw = random.Random(f"{self.seed}/{self.name}/{number}")
            cut = trial.recording.drawn(draw) if every is None else every[number]
            if number < after:
                trial.skip(cut)
                continue
            twice = draw if every is None and number % TWICE == 0 else None
            self._attempt(trial, number, cut, twice, count)

    def _attempt(
        self, trial: Trial, number: int, cut: Cut, draw: random.Random | None, count: Count
    ) -> None:
        """Try a state and count it."""
        begun, one = time.monotonic(), Count()
        problem = trial.attempt(cut, draw, one)
        one.seconds = time.monotonic() - begun
        failures = {} if problem is None else {f"--replay {self.name}:{number}": problem}
        count.failures += [f"--seed {self.seed} {case}: {w}" for case, w in failures.items()]
        names = ("resumed", "same", "named", "seconds")
        counts = {name: getattr(one, name) for name in names}
        for name in (*names, "drawn"):
            setattr(count, name, getattr(count, name) + getattr(one, name))
        self.state.add(self.name, after=number + 1, failures=failures, counts=counts)
        self.state.save()


def campaign(
    names: list[str],
    folder: Path,
    *,
    states: int,
    seconds: float,
    seed: int,
    first: int = 0,
    state: State | None = None,
) -> dict[str, Count]:
    """Try all states of the store and `states` of the other commands together."""
    state = state or State(program="crashes", seed=seed)
    counts = {name: Count() for name in names}
    opened = Opened(folder)
    deadline = time.monotonic() + seconds
    drawn = max(1, len(counts.keys() - {EXHAUSTED}))
    with quietly(), opened.stack:
        for left, (name, count) in zip(range(len(counts), 0, -1), counts.items(), strict=True):
            now = time.monotonic()
            end = now + (deadline - now) / left
            last = first + -(-states // drawn)
            if name == EXHAUSTED:
                last = state.total.get(name, sys.maxsize)
            if state.next.get(name, 0) >= last or now > deadline:
                continue
            part = Part(name=name, seed=seed, numbers=range(first, last), deadline=end, state=state)
            part.run(opened.command(name), count)
            shutil.rmtree(folder / name, ignore_errors=True)
    return counts


def main() -> int:
    """Run the campaign; return 1 if a state was not mended."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--states", type=int, default=2000, help="of whole commands, in all")
    parser.add_argument("--seconds", type=float, default=3600.0, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=NAMES, help="commands; default: all")
    parser.add_argument("--replay", help="COMMAND:NUMBER of a failure")
    parser.add_argument("--state", type=Path, help=HELP)
    given = parser.parse_args()
    names, states, first = given.only or list(NAMES), given.states, 0
    if given.replay and given.state:
        parser.error("--replay repeats a failure: give it without --state")
    if given.replay:
        name, _, number = given.replay.partition(":")
        names, states, first = [name], 1, int(number)
    state = State.opened("crashes", path=given.state, seed=given.seed)
    place = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="crashes-", dir=place) as folder:
        counts = campaign(
            names,
            Path(folder),
            states=states,
            seconds=given.seconds,
            seed=given.seed,
            first=first,
            state=state,
        )
    code = state.finish("command")
    for name, count in counts.items():
        if count.is_cut:
            print(f"\n{name}: time was over after {state.tried(name):,} states")
    return code


if __name__ == "__main__":
    sys.exit(main())
