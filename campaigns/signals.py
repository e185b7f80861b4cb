"""Signals at random times, and what a case of a campaign of kills went through."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from crash import members

KILLED, TERMINATED, TWICE = "SIGKILL", "SIGTERM", "SIGINT twice"
CONTINUED, STOPPED = "SIGSTOP, SIGCONT", "SIGSTOP, SIGKILL"
SENT = {
    KILLED: (signal.SIGKILL,),
    TERMINATED: (signal.SIGTERM,),
    TWICE: (signal.SIGINT, signal.SIGINT),
    CONTINUED: (signal.SIGSTOP, signal.SIGCONT),
    STOPPED: (signal.SIGSTOP, signal.SIGKILL),
}
WEIGHTS = {KILLED: 4, TERMINATED: 2, TWICE: 2, CONTINUED: 1, STOPPED: 1}  # how often
SOON = 0.25  # share of the time that a command takes
PAUSE_SECONDS = 0.3  # at most, between two signals
GONE_SECONDS = 5.0  # until the children of a killed process have noticed
POLL_SECONDS = 0.002
CODE, ORPHANS, LOCKS = "ends as it should", "no orphan", "no lock left"
TWICE_DONE, TRACEBACK = "nothing finished is done twice", "no traceback"
PARTIAL, BYTES = "no unfinished file", "identical bytes"

Victims = Mapping[str, Callable[[], int]]  # name → process id, 0 while it cannot be disturbed


@dataclass(slots=True, kw_only=True)
class Case:
    """What happened in one case.

    disturbed: (signal, target, stage); failures: (check, what); way: what the command ran on;
    stages: of the command.
    """

    index: int
    scenario: str
    way: str = ""
    disturbed: list[tuple[str, str, str]] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    attempts: int = 0
    stages: tuple[str, ...] = ()

    def note(self, kind: str, target: str, stage: str) -> None:
        """Note a signal, and say so."""
        self.disturbed.append((kind, target, stage))
        print(
            f"{datetime.now(UTC):%X} case {self.index}: {kind} {target}, {stage}", file=sys.stderr
        )

    def check(self, name: str, problem: object) -> None:
        """Note a failure if there is a problem."""
        if problem:
            self.failures.append((name, f"attempt {self.attempts}: {problem}"))
            print(f"FAILED {name} in case {self.index}: {problem}", file=sys.stderr)


def moment(seconds: float, rng: random.Random) -> float:
    """Draw when to disturb what takes this long: every other time soon.

    So there are many signals in one command, and at its resumes.
    """
    return rng.uniform(0, seconds) * rng.choice((1.0, SOON))


def disturb(pid: int, rng: random.Random) -> str:
    """Send signals of a random kind to a process; return the kind, nothing if it has ended."""
    [kind] = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
    first, *then = SENT[kind]
    pause = rng.uniform(0, PAUSE_SECONDS)
    try:
        os.kill(pid, first)
    except ProcessLookupError:
        return ""
    for signum in then:
        time.sleep(pause)
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
    return kind


def still_there(session: int) -> list[int]:
    """Return the processes of a session that do not end."""
    deadline = time.monotonic() + GONE_SECONDS
    while (left := members(session=session)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return left
