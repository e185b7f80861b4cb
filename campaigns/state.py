"""What a campaign has tried so far: a small file with which another run goes on.

A case is drawn from the seed and its number, so a continued run tries the cases that one without a
break would have tried. The file is replaced as a whole every few seconds: after a kill, cases that
it does not have are tried again, and counted once. Nothing of the package is imported here:
`mutants.py` needs it unloaded.
"""

import fcntl
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
FORK_SECONDS = 2.0  # that a fork may outlive a killed program
SAVE_SECONDS = 2.0  # at least, between two writes of the file
MOST_FAILURES = 100  # that are kept of each kind; all are counted
LONGEST_TEXT = 3000  # of a failure
CONFIDENCE = 0.95
HELP = "file of what was tried; another call goes on with it"
TRIED, FAILED = "tried", "failed"


def bound(count: int) -> float:
    """Return the rate of failures that `count` trials without one exclude with 95 % confidence."""
    return 1.0 if count == 0 else 1 - (1 - CONFIDENCE) ** (1 / count)


def rate(tried: int, failed: int) -> str:
    """Return the rate of failures that was seen, or the bound if there was none."""
    return f"{failed / tried:.2%} seen" if failed else f"< {bound(tried):.2%}"


def revision() -> str:
    """Return git's name of this tree, with a plus if files were changed since."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
        )

    name = git("rev-parse", "--short=8", "HEAD").stdout.strip()
    is_changed = git("diff", "--quiet", "HEAD", "--", ".", ":!campaigns/state").returncode == 1
    return f"{name or 'unknown'}{'+' * is_changed}"


def today() -> str:
    """Return the date."""
    return datetime.now(UTC).date().isoformat()


def _take(path: Path) -> None:
    """Keep other programs from a state file until this process and its forks have ended.

    Raises:
        SystemExit: another one has it.
    """
    name = sha256(str(path.resolve()).encode()).hexdigest()[:16]
    lock = os.open(Path(tempfile.gettempdir(), f"exl2flow-{name}.lock"), os.O_CREAT | os.O_RDWR)
    end = time.monotonic() + FORK_SECONDS
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the descriptor stays open
        except BlockingIOError:
            if time.monotonic() > end:
                raise SystemExit(f"`{path}` is in use by another campaign") from None
            time.sleep(0.1)


@dataclass(kw_only=True)
class State:
    """Counts and progress of one program; without a path it is not written.

    options: those that decide which cases there are. revisions: revision → cases tried with it.
    next: part of the enumeration → number of its next case; of: part → what it enumerates; total:
    part → how many cases it has. counts: kind of subject → what became of its cases; most: kind →
    largest values seen. failures: kind, case, what; by these each can be repeated. spread:
    row → column → number, of a second table, of what the cases were.
    """

    program: str
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    revisions: dict[str, int] = field(default_factory=dict)
    first: str = field(default_factory=today)
    last: str = field(default_factory=today)
    next: dict[str, int] = field(default_factory=dict)
    of: dict[str, str] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    counts: dict[str, dict[str, float]] = field(default_factory=dict)
    most: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    spread: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._revision = revision()
        self._saved = time.monotonic()

    @classmethod
    def opened(
        cls,
        program: str,
        *,
        path: Path | None = None,
        seed: int,
        options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return what a state file has, or nothing yet.

        Raises:
            SystemExit: the file is of another program, seed or other options, or in use.
        """
        wanted = {"program": program, "seed": seed, "options": dict(options or {})}
        if path is not None:
            _take(path)
        if path is None or not path.exists():
            return cls(program=program, seed=seed, options=dict(options or {}), path=path)
        try:
            values = json.loads(path.read_bytes())
            found = {name: values[name] for name in wanted}
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"`{path}` is not a campaign's state file ({error!r})") from error
        differing = [
            f"{name} {found[name]!r} there, {value!r} here"
            for name, value in json.loads(json.dumps(wanted)).items()
            if found[name] != value
        ]
        if differing:
            why = "; ".join(differing)
            raise SystemExit(f"`{path}` is of another campaign: {why}; name another --state file")
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what a state file has, whatever campaign it is of."""
        values = json.loads(path.read_bytes())
        return cls(**values, path=path)

    def begin(self, part: str, *, of: str = "", total: int | None = None) -> int:
        """Return the next case of a part; 0 again, without its counts, if it enumerates others."""
        if self.of.get(part, of) != of:
            print(f"`{part}` has changed since its cases were tried: they begin anew", flush=True)
            self.next.pop(part, None)
            self.counts.pop(part, None)
            self.failures = [failure for failure in self.failures if failure["kind"] != part]
        if of:
            self.of[part] = of
        if total is not None:
            self.total[part] = total
        return self.next.setdefault(part, 0)

    def add(
        self,
        kind: str,
        *,
        after: int | None = None,
        part: str | None = None,
        tried: int = 1,
        failures: Mapping[Any, str] | None = None,
        counts: Mapping[str, float] | None = None,
        most: Mapping[str, float] | None = None,
    ) -> None:
        """Count cases of a kind.

        after: the next case of the part, which is called like the kind unless named.
        failures: case → what happened.
        """
        if after is not None:
            self.next[part or kind] = after
            self.revisions[self._revision] = self.revisions.get(self._revision, 0) + tried
        own = self.counts.setdefault(kind, {})
        for name, value in {TRIED: tried, FAILED: len(failures or {}), **(counts or {})}.items():
            own[name] = round(own.get(name, 0) + value, 3)
        for name, value in (most or {}).items():
            largest = self.most.setdefault(kind, {})
            largest[name] = round(max(value, largest.get(name, value)), 3)
        kept = sum(failure["kind"] == kind for failure in self.failures)
        for case, what in list((failures or {}).items())[: max(0, MOST_FAILURES - kept)]:
            self.failures.append({"kind": kind, "case": case, "what": what[-LONGEST_TEXT:]})

    def save(self, *, now: bool = False) -> None:
        """Replace the file, if it is time to."""
        if self.path is None or (not now and time.monotonic() - self._saved < SAVE_SECONDS):
            return
        self.last = today()
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "path"}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}.part")
        try:
            with beside.open("w") as file:
                json.dump(values, file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
        finally:
            beside.unlink(missing_ok=True)
        self._saved = time.monotonic()

    def tried(self, kind: str) -> int:
        """Return the number of cases of a kind."""
        return int(self.counts.get(kind, {}).get(TRIED, 0))

    @property
    def failed(self) -> int:
        """How many cases failed."""
        return int(sum(counts[FAILED] for counts in self.counts.values()))

    def heading(self) -> str:
        """Return what the counts hold for: program, seed, options, revisions and dates."""
        when = self.first if self.first == self.last else f"{self.first} to {self.last}"
        made = ", ".join(f"{name} ({count:,} cases)" for name, count in self.revisions.items())
        options = "".join(f", {name} {value}" for name, value in self.options.items())
        return f"{self.program}, seed {self.seed}{options}, revision {made or 'none'}, {when}"

    def table(self, title: str) -> str:
        """Return a Markdown table with a line for each kind."""
        others = list(dict.fromkeys(name for counts in self.counts.values() for name in counts))
        others = [name for name in others if name not in (TRIED, FAILED)]
        peaks = list(dict.fromkeys(name for most in self.most.values() for name in most))
        names = [title, TRIED, FAILED, "rate (95 %)", *others, *(f"most {n}" for n in peaks)]
        lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
        for kind, counts in self.counts.items():
            row = self.row(kind)
            row += [f"{counts[name]:,.0f}" if name in counts else "" for name in others]
            most = self.most.get(kind, {})
            row += [f"{most[name]:,.2f}" if name in most else "" for name in peaks]
            lines.append(f"| {' | '.join(row)} |")
        return "\n".join(lines)

    def note(self, row: str, column: str, number: int = 1) -> None:
        """Count something other than a case, in the second table."""
        own = self.spread.setdefault(row, {})
        own[column] = own.get(column, 0) + number

    def second_table(self, title: str) -> str:
        """Return the second table."""
        columns = sorted({column for row in self.spread.values() for column in row})
        lines = [f"| {title} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
        for row in sorted(self.spread, key=lambda row: -sum(self.spread[row].values())):
            numbers = (str(self.spread[row].get(column, 0)) for column in columns)
            lines.append(f"| {row} | {' | '.join(numbers)} |")
        return "\n".join(lines)

    def row(self, kind: str) -> list[str]:
        """Return the first cells of a kind's line."""
        tried, failed = self.tried(kind), int(self.counts[kind][FAILED])
        is_all = not failed and self.total.get(kind, -1) == tried
        return [kind, f"{tried:,}", str(failed), "all there are" if is_all else rate(tried, failed)]

    def report(self, title: str) -> str:
        """Return heading and table."""
        return f"{self.heading()}\n\n{self.table(title)}"

    def finish(self, title: str) -> int:
        """Write the file, print failures and table; return the exit code of the program."""
        self.save(now=True)
        print(*self.shown(), sep="\n")
        print(self.report(title))
        return int(self.failed > 0)

    def shown(self, most: int = 20) -> Iterator[str]:
        """Yield the first failures, with the numbers by which they are repeated."""
        for failure in self.failures[:most]:
            yield f"FAILED {failure['kind']}, case {failure['case']}: {failure['what']}\n"
