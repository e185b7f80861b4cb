"""What a lasting server holds besides runs: work pool, deployments, automations.

Deployments and automations are files in Prefect's own form, `prefect.yaml` (a link to the root of
the repository) and `automations.yaml`. What a user changed on the server is kept.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.workers import ProcessWorker

from exl2flow.core.errors import ServerFailed
from exl2flow.flows.server.services import POOL, wait_until
from exl2flow.flows.server.temporary import refusal

API_SECONDS = 60.0  # a server that creates its database takes half of it on a slow machine
DEPLOYMENTS = Path(__file__).with_name("prefect.yaml")
RULES = Path(__file__).with_name("automations.yaml")


def deployment_names() -> list[str]:
    """Return the names of all deployments, as in `convert/nightly` the part after the slash."""
    content: dict[str, Any] = yaml.safe_load(DEPLOYMENTS.read_text(encoding="utf-8"))
    return [deployment["name"] for deployment in content["deployments"]]


def automations() -> list[AutomationCore]:
    """Return the rules that keep runs going; the description ends with a digest of the rule."""
    found = []
    for rule in yaml.safe_load(RULES.read_text(encoding="utf-8")):
        digest = hashlib.sha256(json.dumps(rule, sort_keys=True).encode()).hexdigest()[:8]
        rule["description"] += f" (rule {digest})"
        found.append(AutomationCore.model_validate(rule))
    return found


class Provision:
    """Compares what a server holds with what it should hold, and creates what is missing."""

    def __init__(
        self, api_url: str, folder: Path, *, auth: str | None, mark: Path | None = None
    ) -> None:
        """Address a server.

        Args:
            api_url: as in PREFECT_API_URL.
            folder: where relative paths of deployments start.
            auth: as in PREFECT_API_AUTH_STRING.
            mark: file with the version deployed last; without it, deployments are always applied.
        """
        self.api_url = api_url
        self.folder = folder
        self._auth = auth
        self._mark = mark

    def client(self) -> SyncPrefectClient:
        """Return a client of the server."""
        return SyncPrefectClient(api=self.api_url, auth_string=self._auth)

    def wait(self, *, say: Callable[[str], None]) -> None:
        """Return when the server answers; it may just have been started.

        Raises:
            ServerFailed: it does not answer in time, or refuses the password.
        """
        with self.client() as client:
            if client.api_healthcheck() is not None:
                say(f"waiting up to {API_SECONDS:.0f} s for a Prefect API at `{self.api_url}`")
                wait_until(lambda: client.api_healthcheck() is None, API_SECONDS)
            if (reason := refusal(client)) is not None:
                raise ServerFailed(f"{reason}, or correct `--api`")

    def missing(self) -> list[str]:
        """Return what the server lacks, in words."""
        with self.client() as client:
            rules = {automation.name for automation in client.read_automations()}
            deployed = {deployment.name for deployment in _ours(client)}
            try:
                client.read_work_pool(POOL)
                lacks = []
            except ObjectNotFound:
                lacks = [f"work pool `{POOL}`"]
        lacks += [f"deployment `{n}`" for n in deployment_names() if n not in deployed]
        return lacks + [f"automation `{a.name}`" for a in automations() if a.name not in rules]

    def apply(self) -> None:
        """Create what is missing; renew what a newer version of this package changed.

        Raises:
            ServerFailed: `prefect deploy` failed.
        """
        with self.client() as client:
            _create_pool(client)
            _renew_automations(client)
            before, triggers = _ours(client), client.read_automations()
            is_current = (
                self._mark and self._mark.exists() and self._mark.read_text() == self._now()
            )
            if is_current and {d.name for d in before}.issuperset(deployment_names()):
                return
            self._deploy()
            _restore(client, before)
            _restore_triggers(client, triggers)
            if self._mark is not None:
                self._mark.write_text(self._now())

    def _now(self) -> str:
        """Return what identifies the deployments: file, version and folder."""
        text = DEPLOYMENTS.read_bytes() + str(self.folder).encode()
        return f"{version('exl2flow')}-{hashlib.sha256(text).hexdigest()[:12]}"

    def _deploy(self) -> None:
        words = [sys.executable, "-P", "-m", "prefect", "--no-prompt", "deploy", "--all"]
        given = {"PREFECT_API_URL": self.api_url, "PWD": str(self.folder)}
        if self._auth is not None:
            given["PREFECT_API_AUTH_STRING"] = self._auth
        done = subprocess.run(
            [*words, "--prefect-file", str(DEPLOYMENTS)],
            cwd=self.folder,
            env={**os.environ, **given},
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).strip().splitlines()
            raise ServerFailed(
                f"`prefect deploy` failed for `{DEPLOYMENTS}`: {' '.join(lines[-3:])}; correct "
                "the file and repeat the command"
            )


def _create_pool(client: SyncPrefectClient) -> None:
    pool = WorkPoolCreate(
        name=POOL,
        type="process",
        base_job_template=ProcessWorker.get_default_base_job_template(),
        description="one worker per GPU, one run at a time on each",
    )
    try:
        client.create_work_pool(pool)
    except ObjectAlreadyExists:
        return


def _renew_automations(client: SyncPrefectClient) -> None:
    """Create missing rules; replace those of another version, but leave off what is off."""
    there = {automation.name: automation for automation in client.read_automations()}
    for rule in automations():
        before = there.get(rule.name)
        if before is None:
            client.create_automation(rule)
        elif before.description != rule.description:
            rule.enabled = before.enabled
            client.update_automation(before.id, rule)


def _ours(client: SyncPrefectClient) -> list[DeploymentResponse]:
    """Return the deployments of our pool."""
    return [d for d in client.read_deployments(limit=200) if d.work_pool_name == POOL]


def _restore(client: SyncPrefectClient, before: Sequence[DeploymentResponse]) -> None:
    """Restore the parameters and schedules that were set in the UI."""
    known = {deployment.id: deployment for deployment in before}
    for now in _ours(client):
        then = known.get(now.id)
        if then is None:
            continue
        if then.parameters != now.parameters:
            client.update_deployment(now.id, DeploymentUpdate(parameters=then.parameters))
        schedules = {schedule.slug: schedule for schedule in then.schedules}
        for schedule in now.schedules:
            if schedule.slug and (was := schedules.get(schedule.slug)) is not None:
                changes = was.model_dump(include={"active", "parameters"})
                client.update_deployment_schedule(
                    now.id, schedule.id, schedule=was.schedule, **changes
                )


def _restore_triggers(client: SyncPrefectClient, before: Sequence[Automation]) -> None:
    """Restore the triggers of deployments: their parameters, and whether they are enabled."""
    known = {automation.name: automation for automation in before}
    for now in client.read_automations():
        then = known.get(now.name)
        if then is not None and then.id != now.id:  # deploying creates triggers anew
            kept = now.model_copy(update={"enabled": then.enabled, "actions": then.actions})
            client.update_automation(now.id, core(kept))


def core(automation: Automation) -> AutomationCore:
    """Return the part of an automation that can be set."""
    shown = automation.model_dump(exclude={"id", "owner_resource"})
    return AutomationCore.model_validate(shown)
