"""Starts a lasting Prefect server with its workers, ends it, and checks it."""

from collections.abc import Callable
from typing import Any

from exl2flow.core.errors import ServerFailed
from exl2flow.flows.server.provision import Provision
from exl2flow.flows.server.services import (
    POOL,
    SERVER,
    SUPERVISOR,
    Home,
    ServerSettings,
    answers,
    is_alive,
    listen,
    wait_until,
)

START_SECONDS = 180.0  # the first start creates the database


def provision(home: Home, settings: ServerSettings) -> Provision:
    """Return what applies and checks the deployments of a lasting server."""
    mark = home.path / "deployed"
    return Provision(settings.api_url, settings.folder, auth=settings.auth, mark=mark)


def up(home: Home, settings: ServerSettings, *, say: Callable[[str], None]) -> None:
    """Start what does not run, create what is missing, and return when everything is ready.

    Raises:
        ServerFailed: it runs with other settings, the port is taken, or the server ends.
    """
    with home.busy(say):
        running = home.processes()
        if running:
            _refuse_other_settings(home, settings)
        if not running.keys() & {SERVER, SUPERVISOR}:
            listen(settings.host, settings.port).close()
        home.save_settings(settings)
        if SUPERVISOR in running:
            wait_until(lambda: answers(settings), START_SECONDS)
        else:
            say(f"starting the server in the background; its logs are in `{home.path / 'logs'}`")
            _start(home, settings)
        say("applying work pool, deployments and automations")
        provision(home, settings).apply()
        workers = settings.workers.keys()
        if not wait_until(lambda: home.processes().keys() >= workers, START_SECONDS):
            log = home.reason(next(iter(workers)))
            raise ServerFailed(f"a worker does not keep running; the end of its log:\n{log}")


def _start(home: Home, settings: ServerSettings) -> None:
    """Start the supervisor, and return when the server answers.

    Raises:
        ServerFailed: the server ended, or took too long; the message has the end of its log.
    """
    supervisor = home.start(settings, SUPERVISOR)
    answered = wait_until(lambda: not is_alive(supervisor) or answers(settings), START_SECONDS)
    if answered and is_alive(supervisor):
        return
    home.end_all()
    what = "ended" if answered else f"does not answer after {START_SECONDS:.0f} s"
    raise ServerFailed(
        f"the Prefect server {what}; its log, `{home.log(SERVER)}`, says:\n{home.reason(SERVER)}"
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


def down(home: Home, *, say: Callable[[str], None]) -> list[str]:
    """End workers, then the server, and return the names of the processes that ran.

    Raises:
        ServerFailed: a process cannot be ended.
    """
    if not home.path.exists():
        return []
    with home.busy(say):
        return home.end_all()


def status(home: Home) -> dict[str, Any]:
    """Return what runs and which `problems` there are, as JSON content without passwords.

    Raises:
        ServerFailed: no server was ever started in this home.
    """
    settings = home.started()
    running = home.processes()
    expected = [SUPERVISOR, SERVER, *settings.workers]
    problems = [f"{name} does not run" for name in expected if name not in running]
    if answers(settings):
        problems += [f"missing: {lack}" for lack in provision(home, settings).missing()]
    else:
        problems.append(f"no server answers at {settings.url}")
    return {
        "healthy": not problems,
        "problems": problems,
        "url": settings.url,
        "api_url": settings.api_url,
        "database": settings.shown_database,
        "pool": POOL,
        "folder": str(settings.folder),
        "processes": {
            name: {
                "pid": running[name].pid if name in running else None,
                "log": str(home.log(name)),
            }
            for name in expected
        },
    }
