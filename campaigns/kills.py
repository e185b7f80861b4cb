"""Kill conversions at random, repeat the command until it is done, and compare every byte.

    python campaigns/kills.py --kills 1000 --seed 1

Each case is one command in a folder of its own: a stage is drawn, then a moment in it; there the
command gets a random signal. It starts again until it ends well. A case depends on the seed and its
number only, but for the speed of the machine: `--only N` repeats one.

With `--targets flow worker server`, Prefect runs the conversions, on a server of their own: every
other one as a command, the rest as runs that its worker executes. The signals go to the process of
the flow, to the worker and to the server, which the supervisor starts again.
"""

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))

import deployed
from course import Course
from crash import Conversion, Run, catches
from scenarios import (
    WEIGHTS,
    Material,
    committed,
    held_locks,
    hub_for,
    manifests,
    redone,
    repeated,
    results,
    stamps,
)
from servers import LastingServer, wait_for
from signals import (
    BYTES,
    CODE,
    CONTINUED,
    KILLED,
    LOCKS,
    ORPHANS,
    PARTIAL,
    POLL_SECONDS,
    STOPPED,
    TERMINATED,
    TRACEBACK,
    TWICE,
    TWICE_DONE,
    Case,
    Victims,
    disturb,
    still_there,
)
from state import HELP, State
from traces import leftovers

from exl2flow.flows.server.services import answers

CODES = {KILLED: -signal.SIGKILL, STOPPED: -signal.SIGKILL, TERMINATED: 143, TWICE: 130}
MOST_ATTEMPTS = 60
SHOW_EVERY = 50  # signals
ALL = "signals"  # column of the table of stages
CASES = "cases"  # part of the state
HUB = "hub"  # its folder
COMMAND = "command"  # the target without Prefect
NO_SERVER = "no Prefect API answers"  # before any work
OWN, DEPLOYED = "command", "deployment"  # ways to run a conversion with Prefect


def has_ended(run: Run) -> bool:
    """Return whether a process has ended."""
    return Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"


def ends_within(run: Run, seconds: float) -> bool:
    """Wait for the end of a process, but not longer than this."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if has_ended(run):
            return True
        time.sleep(POLL_SECONDS)
    return False


def attempt(
    run: Run, case: Case, work_root: Path, course: Course, victims: Victims, rng: random.Random
) -> str:
    """Let a process run and disturb it; return the signal that ended it, nothing if none did."""
    known, is_over = stamps(manifests(work_root)), partial(has_ended, run)
    while (seconds := course.until_drawn(work_root, known, rng, is_over)) is not None:
        if ends_within(run, seconds):
            return ""
        target = rng.choice(list(victims))
        stage = course.now(work_root, known)
        pid = victims[target]()
        if not pid or not (kind := disturb(pid, rng)):
            continue
        case.note(kind, target, stage)
        if pid == run.pid and kind != CONTINUED:
            return kind
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a command leaves behind undisturbed, and its stages."""

    results: dict[str, str]
    course: Course


def finished(material: Material, folder: Path, scenario: str) -> Reference:
    """Run a command undisturbed."""
    home = folder.parent
    command = material.command(scenario, home / f"{folder.name}-{scenario}")
    run = command.start()
    course = Course.watched(command.work_root, partial(has_ended, run))
    ended = run.wait()
    assert ended.code == 0, ended.err
    return Reference(results=results(command, home / HUB), course=course)


def run_command(
    command: Conversion,
    case: Case,
    course: Course,
    *,
    server: LastingServer | None,
    targets: list[str],
    rng: random.Random,
    end: float,
) -> str:
    """Start a command, disturb it and repeat it until it is done; return the log.

    end: when to disturb it no more, so that it is soon done.
    """
    before: dict[Path, tuple[int, int]] = {}
    log = ""
    for case.attempts in range(1, MOST_ATTEMPTS + 1):
        if server is not None:
            wait_for(partial(answers, server.api_url))
        run = command.start()
        found = {name: lambda run=run: run.pid for name in (COMMAND, deployed.FLOW)}
        if server is not None:
            found[deployed.SERVER] = partial(deployed.server_process, server)
        run.until(partial(catches, run.pid, signal.SIGTERM))  # the program has begun
        victims = {name: found[name] for name in targets if name in found}
        is_over = time.monotonic() > end
        kind = "" if is_over else attempt(run, case, command.work_root, course, victims, rng)
        ended = run.wait()
        log += f"\n--- {kind or 'undisturbed'}: {ended.code}\n{ended.err}"
        is_refused = ended.code == 1 and NO_SERVER in ended.err
        case.check(
            CODE,
            ended.code not in {0, CODES.get(kind, 0)}
            and not is_refused
            and f"{ended.code}: {ended.err[-500:]}",
        )
        case.check(ORPHANS, still_there(run.pid))
        case.check(LOCKS, held_locks(command.work_root))
        case.check(TRACEBACK, "Traceback" in ended.err and ended.err[-2000:])
        now = committed(command.work_root)
        case.check(TWICE_DONE, redone(before, now))
        before |= now
        if not kind and not is_refused:
            break
    return log


@cache
def reference(material: Material, home: Path, scenario: str) -> Reference:
    """Return what a scenario leaves undisturbed; each process that runs cases finds out once."""
    undisturbed = replace(material, with_prefect=False)  # whose bytes those with it must have
    return finished(undisturbed, home / f"process-{os.getpid()}", scenario)


def run_case(
    material: Material,
    home: Path,
    server: LastingServer | None,
    options: argparse.Namespace,
    case: Case,
) -> Case:
    """Run one case; its folder stays if it fails."""
    rng = random.Random(f"{options.seed}/{case.index}")
    targets = options.targets or [COMMAND]
    own = [name for name in targets if name != deployed.WORKER]
    ways = [OWN] * bool(own) + [DEPLOYED] * bool(options.targets)
    case.way = rng.choice(ways)
    weights = WEIGHTS if case.way == OWN else deployed.SCENARIOS
    [drawn] = rng.choices(list(weights), list(weights.values()))
    case.scenario = case.scenario or drawn
    wanted = reference(material, home, case.scenario)
    case.stages = tuple(wanted.course.seconds)
    folder = home / f"case-{case.index}"
    command = material.command(case.scenario, folder)
    if case.way == DEPLOYED:
        assert server is not None
        log = deployed.run_deployment(
            server, command, case, wanted.course, targets=targets, rng=rng
        )
    else:
        log = run_command(
            command,
            case,
            wanted.course,
            server=server,
            targets=own,
            rng=rng,
            end=options.end,
        )
    case.check(TWICE_DONE, repeated(log))
    case.check(PARTIAL, leftovers(folder))
    known, found = wanted.results, results(command, home / HUB)
    case.check(BYTES, [n for n in {**known, **found} if known.get(n) != found.get(n)])
    if case.failures:
        (folder / "log.txt").write_text(log)
    else:
        shutil.rmtree(folder)
    return case


@contextmanager
def server_for(options: argparse.Namespace, home: Path) -> Iterator[LastingServer | None]:
    """Run the Prefect server of all commands that start from now on, if they use one."""
    if not options.targets:
        yield None
        return
    with deployed.serving(home) as server:
        os.environ.update(PREFECT_API_URL=server.api_url, PREFECT_API_AUTH_STRING=server.auth)
        yield server


def count(case: Case, state: State) -> None:
    """Count a case: by check, and its signals by stage."""
    failed: dict[str, list[str]] = {}
    for name, what in case.failures:
        failed.setdefault(name, []).append(what)
    own = case.attempts if case.way == OWN else 0
    tried = dict.fromkeys((CODE, ORPHANS, LOCKS), case.attempts) | {TRACEBACK: own}
    tried |= {TWICE_DONE: len(case.disturbed), PARTIAL: 1, BYTES: 1}
    for name, number in tried.items():
        texts = failed.get(name, [])
        failures = {f"{case.index}.{i}": text for i, text in enumerate(texts)}
        state.add(name, tried=number, failures=failures)
    for stage in case.stages:
        state.note(stage, ALL, 0)  # so that the table shows stages without a signal
    for kind, target, stage in case.disturbed:
        for column in (ALL, target, kind):
            state.note(stage, column)
    state.add(f"{case.way} {case.scenario}", part=CASES, after=case.index + 1)
    state.save()


def campaign(
    options: argparse.Namespace,
    material: Material,
    home: Path,
    server: LastingServer | None,
    state: State,
) -> None:
    """Run cases until there were enough signals or the time is over."""
    material.convert()
    first = state.begin(CASES) if options.only is None else options.only
    numbers = iter([first]) if options.only is not None else itertools.count(first)
    shown = signals = sum(row[ALL] for row in state.spread.values())
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        run = partial(run_case, material, home, server, options)

        def submit(*, at_most: int) -> set[Future[Case]]:
            cases = (Case(index=i, scenario=options.scenario) for i in islice(numbers, at_most))
            return {pool.submit(run, case) for case in cases}

        pending = submit(at_most=options.jobs if signals < options.kills else 0)
        while pending:
            ready, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in ready:
                case = future.result()
                count(case, state)
                signals += len(case.disturbed)
            if signals - shown >= SHOW_EVERY:
                shown = signals
                print(f"{signals} signals, {state.failed} failures", flush=True)
            if signals < options.kills and time.monotonic() < options.end:
                pending |= submit(at_most=len(ready))


def main() -> int:
    """Run the campaign and print its table; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="signals in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3 * 3600, help="of the whole campaign")
    parser.add_argument("--jobs", type=int, default=1, help="commands at the same time")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--scenario", default="", choices=("", *WEIGHTS), help="only this one")
    parser.add_argument(
        "--targets", nargs="+", choices=deployed.TARGETS, help="of conversions that Prefect runs"
    )
    parser.add_argument("--only", type=int, help="number of the one case to repeat")
    parser.add_argument("--state", type=Path, help=HELP)
    options = parser.parse_args()
    if options.state and (options.jobs > 1 or options.only is not None):
        parser.error("with --state: one job, and no --only")
    options.end = time.monotonic() + options.seconds
    prefect = bool(options.targets)
    if prefect and (options.jobs > 1 or options.device != "cpu"):
        parser.error("with --targets: one job, on the CPU")
    kinds = {"device": options.device, "scenario": options.scenario, "targets": options.targets}
    given = {name: value for name, value in kinds.items() if value}
    state = State.opened("kills", path=options.state, seed=options.seed, options=given)
    home = Path(tempfile.mkdtemp(prefix="kills-"))
    material = Material(root=home / "material", device=options.device, with_prefect=prefect)
    material.write()
    before = state.failed
    with hub_for(home / HUB, material.model), server_for(options, home) as server:
        campaign(options, material, home, server, state)
    state.save(now=True)
    for text in state.shown():
        print(f"{text}repeat with --seed {options.seed} --only and the number before the point\n")
    print(f"{state.report('check')}\n\n{state.second_table('signals in stage')}")
    if state.failed > before:
        print(f"\nfolders of the cases that failed: `{home}`")
    else:
        shutil.rmtree(home)
    return int(state.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
