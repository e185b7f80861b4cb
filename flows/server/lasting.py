"""Starts a lasting Prefect server and creates its work pool, deployments and automations."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.workers import ProcessWorker
from sqlalchemy import make_url

from exl2flow.core.errors import ServerFailed
from exl2flow.flows.server.deployments import (
    create,
    deployments,
    find,
    outdated,
    renew,
    renew_rule,
    rules,
)
from exl2flow.flows.server.services import (
    POOL,
    SERVER,
    SUPERVISOR,
    Home,
    ServerSettings,
    answers,
    listen,
    telling,
    wait_until,
)
from exl2flow.flows.server.temporary import START_SECONDS, check


def up(home: Home, settings: ServerSettings, *, say: Callable[[str], None]) -> list[str]:
    """Start what is not running, create what is missing, and return when everything is ready.

    Returns:
        what users set and this version refuses, in words.

    Raises:
        ServerFailed: it runs with other settings, the port is taken, or the server ends.
    """
    with home.busy(say):
        if SUPERVISOR not in home.processes():
            home.end_all()  # what a killed supervisor left behind
            listen(settings.host, settings.port).close()
            home.save_settings(settings)
            say(f"starting the server in the background; its logs are in `{home.logs}`")
            home.start(settings, SUPERVISOR)
        elif (running := home.settings()).model_copy(update={"auth": settings.auth}) != settings:
            raise ServerFailed(
                f"the server of `{home.path}` runs with other options; end it with "
                f"`{home.command('down')}` first, or repeat the options that it was started with"
            )
        else:
            settings = running  # of two that start at once, the other has made the password

        url, auth = settings.api_url, settings.auth
        with telling(say, "the server to answer; its first start creates the database"):
            wait_until(lambda: answers(url) or SUPERVISOR not in home.processes(), START_SECONDS)
        if not answers(url):
            raise ServerFailed(
                f"the Prefect server ended, or did not answer within {START_SECONDS:.0f} s; the "
                f"last lines of its log in `{home.logs}`:\n{home.log_end(SERVER)}"
            )
        say("applying work pool, deployments and automations")
        used = {PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: auth}
        with telling(say, "the server to take them"), temporary_settings(used):
            kept = apply(settings.folder)
        workers = settings.workers.keys()
        with telling(say, "the workers"):
            are_up = wait_until(lambda: home.processes().keys() >= workers, START_SECONDS)
        if not are_up:
            end = home.log_end(next(iter(workers)))
            raise ServerFailed(f"a worker does not keep running; the end of its log:\n{end}")
    return kept


def problems(home: Home, settings: ServerSettings) -> list[str]:
    """Describe what is not running and what is missing."""
    running = home.processes()
    expected = (SUPERVISOR, SERVER, *settings.workers)
    lines = [f"{name} does not run" for name in expected if name not in running]
    if not answers(settings.api_url):
        return [*lines, f"no server answers at {settings.url}"]
    with SyncPrefectClient(settings.api_url, auth_string=settings.auth) as client:
        for rule in rules():
            if not client.read_automations_by_name(rule.name):
                lines.append(f"missing: `{rule.name}`")
        for wanted in deployments(settings.folder):
            found = find(client, wanted)
            if found is None:
                lines.append(f"missing: `{wanted.name}`")
            elif outdated(found, wanted):
                lines.append(f"`{wanted.name}` is that of another version, and so is its form")
    return lines


def without_password(database: str) -> str:
    """Return the address of a database without what may hold its password."""
    return make_url(database).set(query={}).render_as_string(hide_password=True)


def apply(folder: Path) -> list[str]:
    """Create what the server in use lacks; renew what a newer version of this package changed.

    Args:
        folder: where relative paths of deployments start.

    Returns:
        what stays as it is, in words.

    Raises:
        ServerFailed: the server does not answer, or refuses the password.
    """
    kept = []
    with get_client(sync_client=True) as client:
        check(client, "or correct PREFECT_API_URL")
        _create_pool(client)
        for rule in rules():
            kept += renew_rule(client, rule, create=True)
        for wanted in deployments(folder):
            kept += renew(client, find(client, wanted) or create(client, wanted), wanted)
    return kept


def _create_pool(client: SyncPrefectClient) -> None:
    pool = WorkPoolCreate(
        name=POOL,
        type="process",
        base_job_template=ProcessWorker.get_default_base_job_template(),
        description="one worker per GPU, one run at a time on each",
    )
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(pool)
