"""Starts a lasting Prefect server and creates its work pool, deployments and automations.

Deployments and automations are files in Prefect's own form, `prefect.yaml` (a link to the root of
the repository) and `automations.yaml`. Changes that a user made on the server are kept.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    get_current_settings,
    temporary_settings,
)
from prefect.workers import ProcessWorker
from sqlalchemy import make_url

from exl2flow.core.errors import ServerFailed
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

DEPLOYMENTS = Path(__file__).with_name("prefect.yaml")
RULES = Path(__file__).with_name("automations.yaml")


def up(home: Home, settings: ServerSettings, *, say: Callable[[str], None]) -> None:
    """Start what is not running, create what is missing, and return when everything is ready.

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
        with telling(say, "`prefect deploy`"), temporary_settings(used):
            apply(settings.folder)
        workers = settings.workers.keys()
        with telling(say, "the workers"):
            are_up = wait_until(lambda: home.processes().keys() >= workers, START_SECONDS)
        if not are_up:
            end = home.log_end(next(iter(workers)))
            raise ServerFailed(f"a worker does not keep running; the end of its log:\n{end}")


def problems(home: Home, settings: ServerSettings) -> list[str]:
    """Describe what is not running and what is missing."""
    running = home.processes()
    expected = (SUPERVISOR, SERVER, *settings.workers)
    lines = [f"{name} does not run" for name in expected if name not in running]
    if not answers(settings.api_url):
        return [*lines, f"no server answers at {settings.url}"]
    with SyncPrefectClient(settings.api_url, auth_string=settings.auth) as client:
        existing = {d.name for d in _ours(client)} | {a.name for a in client.read_automations()}
    wanted = [*deployment_names(), *(rule.name for rule in automations())]
    return lines + [f"missing: `{name}`" for name in wanted if name not in existing]


def without_password(database: str) -> str:
    """Return the address of a database without what may hold its password."""
    return make_url(database).set(query={}).render_as_string(hide_password=True)


def deployment_names() -> list[str]:
    """Return the names of all deployments, as in `convert/nightly` the part after the slash."""
    content: dict[str, Any] = yaml.safe_load(DEPLOYMENTS.read_text(encoding="utf-8"))
    return [deployment["name"] for deployment in content["deployments"]]


def automations() -> list[AutomationCore]:
    """Return the rules that keep runs going; the description ends with a digest of the rule."""
    rules = []
    for rule in yaml.safe_load(RULES.read_text(encoding="utf-8")):
        digest = hashlib.sha256(json.dumps(rule, sort_keys=True).encode()).hexdigest()[:8]
        rule["description"] += f" (rule {digest})"
        rules.append(AutomationCore.model_validate(rule))
    return rules


def apply(folder: Path) -> None:
    """Create what the server in use lacks; renew what a newer version of this package changed.

    Args:
        folder: where relative paths of deployments start.

    Raises:
        ServerFailed: the server does not answer, refuses the password, or `prefect deploy` failed.
    """
    digest = hashlib.sha256(DEPLOYMENTS.read_bytes() + str(folder).encode()).hexdigest()[:12]
    current = f"{version('exl2flow')}-{digest}"
    with get_client(sync_client=True) as client:
        check(client, "or correct PREFECT_API_URL")
        _create_pool(client)
        _renew_automations(client)
        before, triggers = _ours(client), client.read_automations()
        if {d.name for d in before if d.version == current}.issuperset(deployment_names()):
            return
        _deploy(folder)
        _restore(client, {deployment.id: deployment for deployment in before}, current)
        _restore_triggers(client, triggers)


def _deploy(folder: Path) -> None:
    words = [sys.executable, "-P", "-m", "prefect", "--no-prompt", "deploy", "--all"]
    used = get_current_settings().to_environment_variables(exclude_unset=True)
    done = subprocess.run(
        [*words, "--prefect-file", str(DEPLOYMENTS)],
        cwd=folder,
        env={**os.environ, **used, "PWD": str(folder)},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise ServerFailed(
            f"`prefect deploy` failed for `{DEPLOYMENTS}`: {' '.join(lines[-3:])}; correct "
            "the file and repeat the command"
        )


def _restore(
    client: SyncPrefectClient, before: dict[UUID, DeploymentResponse], current: str
) -> None:
    """Restore the parameters and schedules that were set in the UI, and set the version."""
    for now in _ours(client):
        then = before.get(now.id, now)
        update = DeploymentUpdate(parameters=then.parameters, version=current)
        client.update_deployment(now.id, update)
        schedules = {schedule.slug: schedule for schedule in then.schedules}
        for schedule in now.schedules:
            if schedule.slug and (was := schedules.get(schedule.slug)) is not None:
                client.update_deployment_schedule(
                    now.id, schedule.id, was.active, was.schedule, parameters=was.parameters
                )


def _create_pool(client: SyncPrefectClient) -> None:
    pool = WorkPoolCreate(
        name=POOL,
        type="process",
        base_job_template=ProcessWorker.get_default_base_job_template(),
        description="one worker per GPU, one run at a time on each",
    )
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(pool)


def _renew_automations(client: SyncPrefectClient) -> None:
    """Create missing rules; replace those of another version, but leave off what is off."""
    existing = {automation.name: automation for automation in client.read_automations()}
    for rule in automations():
        before = existing.get(rule.name)
        if before is None:
            client.create_automation(rule)
        elif before.description != rule.description:
            rule.enabled = before.enabled
            client.update_automation(before.id, rule)


def _ours(client: SyncPrefectClient) -> list[DeploymentResponse]:
    """Return the deployments of our pool."""
    return [d for d in client.read_deployments(limit=200) if d.work_pool_name == POOL]


def _restore_triggers(client: SyncPrefectClient, before: Sequence[Automation]) -> None:
    """Restore the triggers of deployments: their parameters, and whether they are enabled."""
    known = {automation.name: automation for automation in before}
    for now in client.read_automations():
        then = known.get(now.name)
        if then is not None and then.id != now.id:  # deploying creates triggers anew
            restored = now.model_copy(update={"enabled": then.enabled, "actions": then.actions})
            client.update_automation(now.id, core(restored))


def core(automation: Automation) -> AutomationCore:
    """Return the part of an automation that can be set."""
    return AutomationCore.model_validate(automation.model_dump(exclude={"id", "owner_resource"}))
