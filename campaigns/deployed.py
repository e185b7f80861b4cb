"""A Prefect server for a campaign of kills, and runs that its worker executes."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid4

import httpx
import psutil
from course import Course
from crash import Conversion
from hub_server import TOKEN
from prefect.events.schemas.automations import EventTrigger
from prefect_runs import run_count, run_state
from scenarios import SOURCE, committed, held_locks, redone, target_of
from servers import PATIENCE_SECONDS, LastingServer
from signals import (
    CODE,
    GONE_SECONDS,
    LOCKS,
    ORPHANS,
    TERMINATED,
    TWICE,
    TWICE_DONE,
    Case,
    Victims,
    disturb,
    moment,
)

from exl2flow.flows.server.deployments import core
from exl2flow.flows.server.services import Home, answers

T = TypeVar("T")
FLOW, WORKER, SERVER = TARGETS = ("flow", "worker", "server")
SCENARIOS = {"fast": 2, "shards": 1, "best": 2, "hub": 2}  # of the deployment; how often
WITHIN = {"without a heartbeat": 65, "back to the queue": 90}  # seconds, instead of 90 and 600
CRASHED, CANCELLED = "Crashed", "Cancelled"
COMPLETED, FAILED = "Completed", "Failed"
ENDS = (COMPLETED, CANCELLED, FAILED)
MOST_STARTS = 4  # of a run that crashes
MOST_ATTEMPTS = 20
IN_STAGE = 0.75  # share of signals whose stage is drawn; the others come at any time
ASK_SECONDS = 1.0  # between two questions whether a run has ended
NOBODY = "no process of a run"
REST_SECONDS = 10.0  # between two signals to the server; then it is up again
SOON_SECONDS, STAYS_SECONDS = 5.0, 120.0  # a crashed run goes on sooner
RUN_SECONDS = 600.0
POLL_SECONDS = 0.2


@contextmanager
def serving(home: Path) -> Iterator[LastingServer]:
    """Run a server with one worker, which notices earlier than usual that a run does not go on."""
    server = LastingServer(home=home / "server", folder=home, env={"HF_TOKEN": TOKEN})
    server.up()
    try:
        with server.client() as client:
            for rule in client.read_automations():
                for name, seconds in WITHIN.items():
                    if name in rule.name and isinstance(rule.trigger, EventTrigger):
                        rule.trigger.within = timedelta(seconds=seconds)
                        client.update_automation(rule.id, core(rule))
        yield server
    finally:
        server.call("down")


def server_process(server: LastingServer) -> int:
    """Return the server's process id, 0 if it does not answer, or has not for long."""
    pid = server.pid(SERVER)
    if not pid or time.time() - psutil.Process(pid).create_time() < REST_SECONDS:
        return 0
    return pid if answers(server.api_url) else 0


def processes_of_runs(server: LastingServer) -> list[int]:
    """Return the processes of runs, whoever started them."""
    found = Home(server.home).processes()
    return [process.pid for name, process in found.items() if name.startswith("process")]


def config_of(name: str, command: Conversion) -> dict[str, Any]:
    """Return the parameters with which the deployment does what a command does."""
    hub = {"publish": {"repo": target_of(command.out.parent)}} if name == "hub" else {}
    return {
        "source": SOURCE if hub else str(command.source),
        "out": str(command.out),
        "work_root": str(command.work_root),
        "device": "cpu",
        "quality": "best" if name == "best" else "fast",
        "head_bits": 8,
        "shard_size_mb": 1,
        "calibration": {
            "rows": 3,
            "row_tokens": 64,
            "measure_rows": 2,
            "measure_row_tokens": 64,
        },
        "validate_options": {"rows": 1, "row_tokens": 64, "sample_tokens": 2},
        **hub,
    }


def settled_files(work_root: Path) -> dict[Path, tuple[int, int]]:
    """Return what is committed while the run goes on, which also removes files."""
    while True:
        try:
            return committed(work_root)
        except FileNotFoundError:
            continue


def patiently(question: Callable[[], T]) -> T:
    """Ask the server, again while it is down."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return question()
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)


class Deployed:
    """A run of a deployment, as often as it takes until it is complete."""

    def __init__(self, server: LastingServer, case: Case, command: Conversion) -> None:
        self.server, self.case, self.command = server, case, command
        self.before: dict[Path, tuple[int, int]] = {}

    def state(self, run: UUID) -> str:
        """Return the name of a run's state; while the server is down, nothing."""
        with suppress(httpx.HTTPError):
            return run_state(run) if answers(self.server.api_url) else ""
        return ""

    def note_committed(self) -> None:
        """Note what is committed, and what was done again."""
        now = settled_files(self.command.work_root)
        self.case.check(TWICE_DONE, redone(self.before, now))
        self.before |= now

    def stays_crashed(self, run: UUID) -> bool:
        """Return whether a run remains crashed."""
        is_over = patiently(lambda: run_count(run)) == MOST_STARTS
        deadline = time.monotonic() + (SOON_SECONDS if is_over else STAYS_SECONDS)
        while time.monotonic() < deadline:
            if self.state(run) not in ("", CRASHED):
                return False
            time.sleep(POLL_SECONDS)
        return True

    def end(self, run: UUID) -> str:
        """Return the name of a run's final state, nothing if it goes on."""
        state = self.state(run)
        if state == FAILED:
            time.sleep(SOON_SECONDS)  # a run that was interrupted is cancelled by its hook
            state = self.state(run)
        return state if state in ENDS or (state == CRASHED and self.stays_crashed(run)) else ""

    def ends_within(self, run: UUID, seconds: float) -> str:
        """Return the name of the final state, nothing if it does not end by then."""
        deadline = time.monotonic() + seconds
        while True:
            if state := self.end(run):
                return state
            if (left := deadline - time.monotonic()) <= 0:
                return ""
            time.sleep(min(POLL_SECONDS, left))

    def asked_now_and_then(self, run: UUID, last: float) -> Callable[[], bool]:
        """Return what tells whether a run has ended, or its time is over."""
        asked = time.monotonic()

        def is_over() -> bool:
            nonlocal asked
            if (now := time.monotonic()) < asked + ASK_SECONDS:
                return False
            asked = now
            return now > last or bool(self.end(run))

        return is_over

    def until_it_ends(
        self, run: UUID, victims: Victims, course: Course, rng: random.Random
    ) -> tuple[str, list[tuple[str, str]]]:
        """Disturb a run until it ends; return its state, and the signals of each target."""
        last = time.monotonic() + RUN_SECONDS
        is_over, sent = self.asked_now_and_then(run, last), list[tuple[str, str]]()
        while time.monotonic() < last:
            if rng.random() < IN_STAGE:
                seconds = course.until_drawn(self.command.work_root, {}, rng, is_over) or 0.0
            else:
                seconds = moment(sum(course.seconds.values()), rng)
            if state := self.ends_within(run, seconds):
                return state, sent
            target = rng.choice(list(victims))
            is_at_work = bool(processes_of_runs(self.server))
            stage = course.now(self.command.work_root, {}) if is_at_work else NOBODY
            if (pid := victims[target]()) and (kind := disturb(pid, rng)):
                self.case.note(kind, target, stage)
                sent.append((target, kind))
                self.note_committed()
        return f"not ended in {RUN_SECONDS:.0f} s: {self.state(run)}", sent


def expected(state: str, starts: int, sent: Sequence[tuple[str, str]]) -> bool:
    """Return whether a run may end like this."""
    match state:
        case "Completed":
            return True
        case "Cancelled":
            return bool({(FLOW, TERMINATED), (FLOW, TWICE)} & {*sent})
        case "Crashed":
            return starts == MOST_STARTS <= len(sent)
        case "Failed":  # it did not begin
            return starts == 0 and len(sent) >= MOST_STARTS
    return False


def run_deployment(
    server: LastingServer,
    command: Conversion,
    case: Case,
    course: Course,
    *,
    targets: Sequence[str],
    rng: random.Random,
) -> str:
    """Have the worker run a conversion until it is complete, and disturb it; return the log."""
    deployed = Deployed(server, case, command)
    config = config_of(case.scenario, command)
    log = server.home / "logs" / "worker.log"
    begin = log.stat().st_size
    runs = lambda: next(iter(processes_of_runs(server)), 0)  # noqa: E731
    found = {FLOW: runs, WORKER: lambda: server.pid(WORKER), SERVER: lambda: server_process(server)}
    victims = {name: found[name] for name in targets}
    for case.attempts in range(1, MOST_ATTEMPTS + 1):
        key = str(uuid4())  # so that a repeated request submits nothing else
        run = patiently(lambda key=key: server.submit("convert/convert", config, key))
        state, sent = deployed.until_it_ends(run, victims, course, rng)
        starts = patiently(lambda run=run: run_count(run))
        case.check(CODE, not expected(state, starts, sent) and f"{state} after {starts} starts")
        case.check(ORPHANS, lasting_runs(server))
        case.check(LOCKS, held_locks(command.work_root))
        deployed.note_committed()
        if state == COMPLETED:
            break
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


def lasting_runs(server: LastingServer) -> list[int]:
    """Return the processes of runs that do not end."""
    deadline = time.monotonic() + GONE_SECONDS
    while (left := processes_of_runs(server)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return left
