"""Kill conversions at random, repeat the command until it is done, and compare every byte.

    python campaigns/kills.py --kills 1000 --seed 1

Each case is one command in a folder of its own: a stage is drawn, then a moment in it; there the
command gets a random signal. It starts again until it ends well. A case depends on the seed and its
number only, but for the speed of the machine: `--only N` repeats one.

With `--targets flow worker server`, Prefect runs the conversions, on a server of their own: every
other one as a command, the rest as runs that its worker executes. The signals go to the process of
the flow, to the worker and to the server, which the supervisor starts again. Runs of the worker get
them at random parts of the time that they take.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))

import deployed
import tally
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
    under_way,
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
from traces import leftovers

from exl2flow.flows.server.services import answers

CODES = {KILLED: -signal.SIGKILL, STOPPED: -signal.SIGKILL, TERMINATED: 143, TWICE: 130}
MOST_ATTEMPTS = 60
SHOW_EVERY = 50  # signals
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
        stage = under_way(work_root, known)
        pid = victims[target]()
        if not pid or not (kind := disturb(pid, rng)):
            continue
        case.note(kind, target, stage)
        if pid == run.pid and kind != CONTINUED:
            return kind
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a command leaves behind undisturbed, the seconds that it takes, and its stages."""

    results: dict[str, str]
    seconds: float
    course: Course


def finished(material: Material, home: Path, scenario: str) -> Reference:
    """Run a command undisturbed."""
    command = material.command(scenario, home / f"undisturbed-{scenario}")
    begun = time.monotonic()
    run = command.start()
    course = Course.watched(command.work_root, partial(has_ended, run))
    ended = run.wait()
    assert ended.code == 0, ended.err
    seconds = time.monotonic() - begun
    return Reference(results=results(command, home / HUB), seconds=seconds, course=course)


def run_command(
    command: Conversion,
    case: Case,
    course: Course,
    *,
    server: LastingServer | None,
    targets: list[str],
    rng: random.Random,
) -> str:
    """Start a command, disturb it and repeat it until it is done; return the log."""
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
        kind = attempt(run, case, command.work_root, course, victims, rng)
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


def run_case(
    material: Material,
    home: Path,
    references: dict[str, Reference],
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
    reference = references[case.scenario]
    case.stages = tuple(reference.course.seconds)
    folder = home / f"case-{case.index}"
    command = material.command(case.scenario, folder)
    if case.way == DEPLOYED:
        assert server is not None
        log = deployed.run_deployment(
            server, command, case, reference.seconds, targets=targets, rng=rng
        )
    else:
        log = run_command(command, case, reference.course, server=server, targets=own, rng=rng)
    case.check(TWICE_DONE, repeated(log))
    case.check(PARTIAL, leftovers(folder))
    wanted, found = reference.results, results(command, home / HUB)
    case.check(BYTES, [n for n in {**wanted, **found} if wanted.get(n) != found.get(n)])
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


def campaign(
    options: argparse.Namespace, material: Material, home: Path, server: LastingServer | None
) -> list[Case]:
    """Run cases until there were enough signals or the time is over."""
    material.convert()
    deadline = time.monotonic() + options.seconds
    numbers = iter([options.only]) if options.only is not None else count()
    done: list[Case] = []
    shown = 0
    names = [options.scenario] if options.scenario else list(WEIGHTS)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        undisturbed = replace(material, with_prefect=False)  # whose bytes those with it must have
        found = pool.map(partial(finished, undisturbed, home), names)
        references = dict(zip(names, found, strict=True))
        run = partial(run_case, material, home, references, server, options)

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


def stages_table(done: list[Case]) -> str:
    """Return a Markdown table of the signals by target and stage, those without one as well."""
    counts = Counter((stage, target) for case in done for _, target, stage in case.disturbed)
    targets = sorted({target for _, target in counts})
    stages = {stage for stage, _ in counts}.union(*(case.stages for case in done))
    lines = [f"| signals in stage | {' | '.join(targets)} |", f"|---|{'---|' * len(targets)}"]
    for stage in sorted(stages, key=lambda s: (-sum(counts[s, t] for t in targets), s)):
        lines.append(f"| {stage} | {' | '.join(str(counts[stage, t]) for t in targets)} |")
    return "\n".join(lines)


def report(done: list[Case], options: argparse.Namespace, home: Path) -> str:
    """Return the table of a campaign, and how to repeat what failed."""
    events = [event for case in done for event in case.disturbed]
    attempts = sum(case.attempts for case in done)
    own = sum(case.attempts for case in done if case.way == OWN)
    tried = {CODE: attempts, ORPHANS: attempts, LOCKS: attempts, TRACEBACK: own}
    tried |= {TWICE_DONE: len(events)} | dict.fromkeys((PARTIAL, BYTES), len(done))
    failed = Counter(name for case in done for name, _ in case.failures)
    ways = tally.spread(f"{case.way} {case.scenario}" for case in done)
    lines = [
        f"seed {options.seed}, device {options.device}: {len(events)} signals in {len(done)} "
        f"conversions ({ways}), started {attempts} times",
        f"signals: {tally.spread(kind for kind, _, _ in events)}",
        "",
        stages_table(done),
        "",
        tally.table("check", tried, failed),
    ]
    for case in done:
        for name, what in case.failures:
            lines += [
                "",
                f"FAILED {name} in `{home}/case-{case.index}`, repeat with --seed "
                f"{options.seed} --only {case.index}: {case.disturbed}\n{what}",
            ]
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
    parser.add_argument(
        "--targets", nargs="+", choices=deployed.TARGETS, help="of conversions that Prefect runs"
    )
    parser.add_argument("--only", type=int, help="number of the one case to repeat")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="kills-"))
    prefect = bool(options.targets)
    if prefect and (options.jobs > 1 or options.device != "cpu"):
        parser.error("with --targets: one job, on the CPU")
    material = Material(root=home / "material", device=options.device, with_prefect=prefect)
    material.write()
    with hub_for(home / HUB, material.model), server_for(options, home) as server:
        done = campaign(options, material, home, server)
    print(report(done, options, home))
    has_failed = any(case.failures for case in done)
    if not has_failed:
        shutil.rmtree(home)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
