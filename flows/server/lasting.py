"""A lasting Prefect server with workers: brought up, brought down, looked at."""

import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefect.client.schemas.sorting import FlowRunSort
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from exl2flow.core.errors import ConfigError, ServerFailed
from exl2flow.flows.server.provision import Provision, ours
from exl2flow.flows.server.services import (
    DATABASE_VARIABLE,
    POOL,
    SERVER,
    SUPERVISOR,
    Home,
    Process,
    ServerSettings,
    answers,
    end,
    listen,
    wait_until,
)

START_SECONDS = 180.0  # the first start creates the database
DATABASE_SECONDS = 10.0
POSTGRESQL_PORT = 5432
DATABASES = {  # driver → form of its URL
    "postgresql+asyncpg": "postgresql+asyncpg://user:password@host:5432/name",
    "sqlite+aiosqlite": "sqlite+aiosqlite:////path/of/file.db",
}
STOP_SECONDS = 90.0  # workers get 30 s to end their runs, the server 10 s
LAST_RUNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What there is; `problems` is empty when all is well."""

    settings: ServerSettings
    problems: tuple[str, ...]
    processes: dict[str, dict[str, object]]
    deployments: tuple[dict[str, object], ...] = ()
    runs: tuple[dict[str, object], ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return it as JSON content."""
        return {
            "healthy": not self.problems,
            "problems": list(self.problems),
            "url": self.settings.url,
            "api_url": self.settings.api_url,
            "database": self.settings.shown_database,
            "pool": POOL,
            "folder": str(self.settings.folder),
            "processes": self.processes,
            "deployments": list(self.deployments),
            "runs": list(self.runs),
        }


def up(home: Home, settings: ServerSettings, *, say: Callable[[str], None]) -> None:
    """Start what does not run, create what is missing, and return when all of it is there.

    Raises:
        ServerFailed: it runs with other settings, the port is taken, or the server ends.
    """
    with home.busy(say):
        alive = home.alive()
        if alive:
            _refuse_other_settings(home, settings)
        if not alive.keys() & {SERVER, SUPERVISOR}:
            listen(settings.host, settings.port).close()
            if settings.database is not None:
                check_database(settings.database)
        home.save_settings(settings)
        if SUPERVISOR in alive:
            wait_until(lambda: answers(settings), START_SECONDS)
        else:
            say(f"starting the server in the background; its logs lie in `{home.path / 'logs'}`")
            _start_supervisor(home, alive)
            _wait_for_server(home, settings)
        say("applying work pool, deployments and automations")
        Provision(settings.api_url, settings.folder).apply(home.path / "deployed")
        if not wait_until(lambda: home.alive().keys() >= settings.workers.keys(), START_SECONDS):
            raise ServerFailed(
                f"a worker does not stay; the end of its log:\n"
                f"{home.last_lines(next(iter(settings.workers)))}"
            )


def down(home: Home, *, say: Callable[[str], None]) -> list[str]:
    """End workers, then the server, and return the names of the processes that ran.

    Raises:
        ServerFailed: a process cannot be ended.
    """
    if not home.path.exists():
        return []
    with home.busy(say):
        return _end_all(home)


def _end_all(home: Home) -> list[str]:
    running = home.alive()
    if SUPERVISOR in running:
        end([running[SUPERVISOR]], STOP_SECONDS)
    home.end_services()  # which a killed supervisor could not do
    left = [str(process.pid) for process in running.values() if process.is_alive()]
    if left:
        raise ServerFailed(f"processes {', '.join(left)} do not end; look at them with `ps`")
    return list(running)


def status(home: Home) -> Status:
    """Look at processes, server and what it holds.

    Raises:
        ServerFailed: no server was ever started in this home.
    """
    settings = home.settings()
    if settings is None:
        raise ServerFailed(
            f"no server was started in `{home.path}`; `{home.command('up')}` starts one"
        )
    processes = home.processes()
    expected = [SUPERVISOR, SERVER, *settings.workers]
    shown: dict[str, dict[str, object]] = {}
    for name in expected:
        process = processes.get(name)
        alive = process is not None and process.is_alive()
        pid, exits = (process.pid, process.exits) if process else (None, 0)
        shown[name] = {"running": alive, "pid": pid, "exits": exits, "log": str(home.log(name))}
    problems = [f"{name} does not run" for name in expected if not shown[name]["running"]]
    if not answers(settings):
        problems.append(f"no server answers at {settings.url}")
        return Status(settings=settings, problems=tuple(problems), processes=shown)
    provision = Provision(settings.api_url, settings.folder)
    problems += [f"missing: {lack}" for lack in provision.missing()]
    return Status(
        settings=settings,
        problems=tuple(problems),
        processes=shown,
        deployments=_deployments(provision),
        runs=_runs(provision),
    )


def _deployments(provision: Provision) -> tuple[dict[str, object], ...]:
    with provision.client() as client:
        return tuple(
            {
                "name": found.name,
                "schedules": [
                    {"slug": s.slug, "active": s.active, "schedule": _when(s.schedule)}
                    for s in found.schedules
                ],
            }
            for found in sorted(ours(client), key=lambda d: d.name)
        )


def _when(schedule: object) -> str:
    for name in ("cron", "interval", "rrule"):
        if (value := getattr(schedule, name, None)) is not None:
            return f"{name} {value}"
    return str(schedule)


def _runs(provision: Provision) -> tuple[dict[str, object], ...]:
    with provision.client() as client:
        found = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=LAST_RUNS)
    return tuple(
        {
            "name": run.name,
            "state": run.state_name,
            "starts": run.run_count,
            "expected": run.expected_start_time.isoformat() if run.expected_start_time else None,
            "id": str(run.id),
        }
        for run in found
    )


def _refuse_other_settings(home: Home, settings: ServerSettings) -> None:
    running = home.settings()
    if running is not None and running != settings:
        fields = ServerSettings.model_fields
        changed = [f for f in fields if getattr(running, f) != getattr(settings, f)]
        raise ServerFailed(
            f"the server of `{home.path}` runs with another {' and '.join(changed)}; end it with "
            f"`{home.command('down')}` first, or repeat the options that it was started with"
        )


def check_database(url: str) -> None:
    """Refuse a database that the server could not use.

    Raises:
        ConfigError: it is of another kind, or the URL is none.
        ServerFailed: nothing listens where it should be.
    """
    try:
        parts = make_url(url)
    except (ArgumentError, ValueError):  # which may have the password in their messages
        kind = ""
    else:
        kind = parts.drivername
    if kind not in DATABASES:
        forms = " or ".join(f"`{form}`" for form in DATABASES.values())
        raise ConfigError(f"`--database` (or {DATABASE_VARIABLE}) must be like {forms}")
    if parts.host is None:  # SQLite, or a socket of this machine
        return
    place = (parts.host, parts.port or POSTGRESQL_PORT)
    try:
        socket.create_connection(place, DATABASE_SECONDS).close()
    except OSError as error:
        raise ServerFailed(
            f"the database does not answer at `{place[0]}:{place[1]}` ({error}); start it, or mend "
            f"`--database` (or {DATABASE_VARIABLE})"
        ) from error


def _start_supervisor(home: Home, alive: Mapping[str, Process]) -> None:
    home.save_processes(alive)  # the count of exits begins anew
    with home.log(SUPERVISOR).open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-P", "-m", "exl2flow.flows.server.supervisor", str(home.path)],
            cwd=home.path,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait_for_server(home: Home, settings: ServerSettings) -> None:
    """Return when the server that was started answers.

    Raises:
        ServerFailed: it ended, or took too long; the message has the end of its log.
    """
    before = home.processes().get(SERVER)
    exits = before.exits if before else 0

    def ended() -> bool:
        server = home.processes().get(SERVER)
        return server is not None and (server.exits > exits or not server.is_alive())

    came = wait_until(lambda: ended() or answers(settings), START_SECONDS)
    if came and not ended():  # another program could answer at that port
        return
    _end_all(home)
    what = "ended" if came else f"does not answer after {START_SECONDS:.0f} s"
    raise ServerFailed(
        f"the Prefect server {what}; its log, `{home.log(SERVER)}`, says:\n{home.reason(SERVER)}"
    )
