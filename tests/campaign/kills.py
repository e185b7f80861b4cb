"""Kill conversions at random, repeat the command until it is done, and compare every byte.

    python tests/campaign/kills.py --kills 1000 --seed 1

Each case is one command in a folder of its own: it runs for a random part of the time that it takes
undisturbed, gets a random signal, and starts again, until it ends well. A case depends on the seed
and its number only, but for the speed of the machine: `--only N` repeats one.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))

from campaign import tally
from campaign.scenarios import (
    WEIGHTS,
    Material,
    committed,
    held_locks,
    hub_for,
    redone,
    repeated,
    results,
    under_way,
)
from crash import Run, catches, members
from traces import leftovers

KILLED, TERMINATED, TWICE = "SIGKILL", "SIGTERM", "SIGINT twice"
CONTINUED, STOPPED = "SIGSTOP, SIGCONT", "SIGSTOP, SIGKILL"
SIGNALS = {KILLED: 4, TERMINATED: 2, TWICE: 2, CONTINUED: 1, STOPPED: 1}  # how often
CODES = {KILLED: -signal.SIGKILL, STOPPED: -signal.SIGKILL, TERMINATED: 143, TWICE: 130}
SOON = 0.25  # share of the time that a command takes
PAUSE_SECONDS = 0.3  # at most, between two signals
GONE_SECONDS = 5.0  # until the children of a killed process have noticed
POLL_SECONDS = 0.002
MOST_ATTEMPTS = 60
SHOW_EVERY = 50  # signals
HUB = "hub"  # its folder
CODE, ORPHANS, LOCKS = "ends with its exit code", "no orphan", "no lock left"
TWICE_DONE, TRACEBACK = "nothing finished is done twice", "no traceback"
PARTIAL, BYTES = "no unfinished file", "identical bytes"


@dataclass(slots=True, kw_only=True)
class Case:
    """What happened in one case. disturbed: (signal, stage) pairs; failures: (check, what)."""

    index: int
    scenario: str
    disturbed: list[tuple[str, str]] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    attempts: int = 0

    def check(self, name: str, problem: object) -> None:
        """Note a failure if there is a problem."""
        if problem:
            self.failures.append((name, f"attempt {self.attempts}: {problem}"))


def ends_within(run: Run, seconds: float) -> bool:
    """Wait for the end of a process, but not longer than this."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in "ZX":
            return True
        time.sleep(POLL_SECONDS)
    return False


def disturb(run: Run, kind: str, rng: random.Random) -> None:
    """Send the signals of a kind."""
    pause = rng.uniform(0, PAUSE_SECONDS)
    match kind:
        case "SIGKILL":
            run.send(signal.SIGKILL)
        case "SIGTERM":
            run.send(signal.SIGTERM)
        case "SIGINT twice":
            run.send(signal.SIGINT)
            time.sleep(pause)
            run.send(signal.SIGINT)
        case _:
            run.send(signal.SIGSTOP)
            time.sleep(pause)
            run.send(signal.SIGCONT if kind == CONTINUED else signal.SIGKILL)


def attempt(run: Run, case: Case, work_root: Path, seconds: float, rng: random.Random) -> str:
    """Let a process run and disturb it; return the signal that ended it, nothing if none did.

    Every other time it comes soon, so that there are many in one command and at its resumes.
    """
    while not ends_within(run, rng.uniform(0, seconds) * rng.choice((1.0, SOON))):
        [kind] = rng.choices(list(SIGNALS), list(SIGNALS.values()))
        stage = under_way(work_root)
        disturb(run, kind, rng)
        case.disturbed.append((kind, stage))
        if kind != CONTINUED:
            return kind
    return ""


def still_there(session: int) -> list[int]:
    """Return the processes of a session that do not end."""
    deadline = time.monotonic() + GONE_SECONDS
    while (left := members(session=session)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return left


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a command leaves behind undisturbed, and the seconds that it takes."""

    results: dict[str, str]
    seconds: float


def finished(material: Material, home: Path, scenario: str) -> Reference:
    """Run a command undisturbed."""
    command = material.command(scenario, home / f"undisturbed-{scenario}")
    begun = time.monotonic()
    command.finish()
    seconds = time.monotonic() - begun
    return Reference(results=results(command, home / HUB), seconds=seconds)


def scenario_of(rng: random.Random, chosen: str | None) -> str:
    """Draw a scenario, unless one is chosen."""
    [drawn] = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
    return chosen or drawn


def run_case(
    material: Material, home: Path, references: dict[str, Reference], seed: int, case: Case
) -> Case:
    """Run one case; its folder stays if it fails."""
    rng = random.Random(f"{seed}/{case.index}")
    case.scenario = scenario_of(rng, case.scenario or None)
    reference = references[case.scenario]
    folder = home / f"case-{case.index}"
    command = material.command(case.scenario, folder)
    before: dict[Path, tuple[int, int]] = {}
    log = ""
    for case.attempts in range(1, MOST_ATTEMPTS + 1):
        run = command.start()
        run.until(partial(catches, run.pid, signal.SIGTERM))  # the program has begun
        kind = attempt(run, case, command.work_root, reference.seconds, rng)
        ended = run.wait()
        log += f"\n--- {kind or 'undisturbed'}: {ended.code}\n{ended.err}"
        case.check(
            CODE, ended.code not in {0, CODES.get(kind, 0)} and f"{ended.code}: {ended.err[-500:]}"
        )
        case.check(ORPHANS, still_there(run.pid))
        case.check(LOCKS, held_locks(command.work_root))
        case.check(TRACEBACK, "Traceback" in ended.err and ended.err[-2000:])
        now = committed(command.work_root)
        case.check(TWICE_DONE, redone(before, now))
        before |= now
        if not kind:
            break
    case.check(TWICE_DONE, repeated(log))
    case.check(PARTIAL, leftovers(folder))
    wanted, found = reference.results, results(command, home / HUB)
    case.check(BYTES, [n for n in {**wanted, **found} if wanted.get(n) != found.get(n)])
    if case.failures:
        (folder / "log.txt").write_text(log)
    else:
        shutil.rmtree(folder)
    return case


def campaign(options: argparse.Namespace, material: Material, home: Path) -> list[Case]:
    """Run cases until there were enough signals or the time is over."""
    material.convert()
    deadline = time.monotonic() + options.seconds
    numbers = iter([options.only]) if options.only is not None else count()
    done: list[Case] = []
    shown = 0
    names = [options.scenario] if options.scenario else list(WEIGHTS)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        found = pool.map(partial(finished, material, home), names)
        run = partial(run_case, material, home, dict(zip(names, found, strict=True)), options.seed)

        def submit(*, at_most: int) -> set[Future[Case]]:
            cases = (Case(index=i, scenario=options.scenario) for i in islice(numbers, at_most))
            return {pool.submit(run, case) for case in cases}

        pending = submit(at_most=options.jobs)
        while pending:
            ready, pending = wait(pending, return_when=FIRST_COMPLETED)
            done += [future.result() for future in ready]
            signals = sum(len(case.disturbed) for case in done)
            if signals - shown >= SHOW_EVERY:
                shown = signals
                failures = sum(len(case.failures) for case in done)
                print(f"{signals} signals, {len(done)} cases, {failures} failures", flush=True)
            if signals < options.kills and time.monotonic() < deadline:
                pending |= submit(at_most=len(ready))
    return done


def report(done: list[Case], options: argparse.Namespace, home: Path) -> str:
    """Return the table of a campaign, and how to repeat what failed."""
    events = [event for case in done for event in case.disturbed]
    attempts = sum(case.attempts for case in done)
    tried = dict.fromkeys((CODE, ORPHANS, LOCKS, TRACEBACK), attempts)
    tried |= {TWICE_DONE: len(events)} | dict.fromkeys((PARTIAL, BYTES), len(done))
    failed = Counter(name for case in done for name, _ in case.failures)
    lines = [
        f"seed {options.seed}, device {options.device}: {len(events)} signals in {len(done)} "
        f"commands ({tally.spread(case.scenario for case in done)})",
        f"signals: {tally.spread(kind for kind, _ in events)}",
        f"stages: {tally.spread(stage for _, stage in events)}",
        "",
        tally.table("check", tried, failed),
    ]
    for case in done:
        for name, what in case.failures:
            lines += ["", f"FAILED {name} in `{home}/case-{case.index}`, repeat with --seed "
                      f"{options.seed} --only {case.index}: {case.disturbed}\n{what}"]  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    """Run the campaign and print its table; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="signals in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3 * 3600, help="of the whole campaign")
    parser.add_argument("--jobs", type=int, default=1, help="commands at the same time")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--scenario", default="", choices=("", *WEIGHTS), help="only this one")
    parser.add_argument("--only", type=int, help="number of the one case to repeat")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="kills-"))
    material = Material(root=home / "material", device=options.device)
    material.write()
    with hub_for(home / HUB, material.model):
        done = campaign(options, material, home)
    print(report(done, options, home))
    has_failed = any(case.failures for case in done)
    if not has_failed:
        shutil.rmtree(home)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
