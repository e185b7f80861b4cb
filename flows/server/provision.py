"""What a lasting server holds besides runs: work pool, deployments, automations.

Deployments are those of `prefect.yaml`, applied by `prefect deploy`: the file is in Prefect's own
form, and a link in this folder takes it into the wheel.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.workers import ProcessWorker

from exl2flow.core.errors import ServerFailed
from exl2flow.flows.server.services import HEARTBEAT_SECONDS, POOL, wait_until

API_SECONDS = 60.0  # a server that creates its database takes half of it on a slow machine
DEPLOYMENTS = Path(__file__).with_name("prefect.yaml")
MISSED_HEARTBEATS = 3
START_SECONDS = 600  # from the worker's taking a run to its first line
RETRIES = 3
DAY_SECONDS = 24 * 3600
TAG = "exl2flow"
REQUEUED = "Requeued"
STARTING = ("Pending", "Submitting", "InfrastructurePending")  # what a worker says before Running
GOES_ON = ("Running", "Retrying", "Rerunning", "Cancelling", "heartbeat")
BACK = ("Scheduled", "AwaitingRetry", "Late", REQUEUED)
ENDS = ("Completed", "Failed", "Cancelled", "Crashed")


def deployment_names() -> list[str]:
    """Return the names of all deployments, as in `convert/nightly` the part after the slash."""
    content: Mapping[str, Any] = yaml.safe_load(DEPLOYMENTS.read_text(encoding="utf-8"))
    return [deployment["name"] for deployment in content["deployments"]]


def automations() -> list[AutomationCore]:
    """Return what keeps runs going: lost ones become crashed, crashed ones run again.

    A run that did not begin has no count of its starts to go by; its returns to the queue are
    counted by the name of the state that they give it.
    """
    seconds = MISSED_HEARTBEATS * HEARTBEAT_SECONDS
    return [
        _automation(
            "without a heartbeat a run has crashed",
            f"No sign of life for {seconds} s: its process or its machine is gone.",
            _trigger("heartbeat", *ENDS, after=("heartbeat",), seconds=seconds),
            ("Crashed", StateType.CRASHED, f"no heartbeat for {seconds} s"),
        ),
        _automation(
            "a run that did not begin goes back to the queue",
            f"At most {RETRIES} times a day. The worker that took it is gone.",
            _trigger(*GOES_ON, *BACK, *ENDS, after=STARTING, seconds=START_SECONDS),
            (REQUEUED, StateType.SCHEDULED, f"did not begin in {START_SECONDS} s"),
        ),
        _automation(
            "a run that never begins has failed",
            f"It went back to the queue {RETRIES + 1} times in a day.",
            _trigger(REQUEUED, seconds=DAY_SECONDS, times=RETRIES + 1),
            (
                "Failed",
                StateType.FAILED,
                f"did not begin {RETRIES + 1} times; see the worker's log",
            ),
        ),
        _automation(
            "a crashed run goes on",
            f"At most {RETRIES} times. What is finished is not done again.",
            _trigger("Crashed", starts=range(1, RETRIES + 1)),
            ("AwaitingRetry", StateType.SCHEDULED, "goes on after a crash"),
        ),
    ]


def _trigger(
    *events: str,
    after: Iterable[str] = (),
    seconds: float = 0,
    times: int = 1,
    starts: Iterable[int] | None = None,
) -> EventTrigger:
    """Return what waits for events of one of our runs.

    With `after` it fires when none of them has come so long after one of those; without, when they
    came so many times within that time. `starts`: how often the run may have been started.
    """
    prefix = "prefect.flow-run"
    match: dict[str, str | list[str]] = {"prefect.resource.id": f"{prefix}.*"}
    if starts is not None:
        match["prefect.run-count"] = [str(count) for count in starts]
    return EventTrigger(
        match=match,
        match_related={"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"},
        for_each={"prefect.resource.id"},
        after={f"{prefix}.{event}" for event in after},
        expect={f"{prefix}.{event}" for event in events},
        posture=Posture.Proactive if after else Posture.Reactive,
        threshold=times,
        within=timedelta(seconds=seconds),
    )


def _automation(
    name: str, description: str, trigger: EventTrigger, state: tuple[str, StateType, str]
) -> AutomationCore:
    """Return an automation that gives a run a state, by name, type and message."""
    name_of_state, kind, message = state
    action = ChangeFlowRunState(name=name_of_state, state=kind, message=message)
    return AutomationCore(
        name=f"{TAG}: {name}", description=description, trigger=trigger, actions=[action]
    )


class Provision:
    """Compares what a server holds with what it should hold, and mends it."""

    def __init__(self, api_url: str, folder: Path) -> None:
        """Address a server; relative paths of its deployments will start from the folder."""
        self.api_url = api_url
        self.folder = folder

    def client(self) -> SyncPrefectClient:
        """Return a client of the server."""
        return SyncPrefectClient(api=self.api_url)

    def wait(self, *, say: Callable[[str], None]) -> None:
        """Return when the server answers, which may just have been started.

        Raises:
            ServerFailed: it does not in time.
        """
        if self._error() is None:
            return
        say(f"waiting up to {API_SECONDS:.0f} s for a Prefect API at `{self.api_url}`")
        if not wait_until(lambda: self._error() is None, API_SECONDS):
            raise ServerFailed(
                f"no Prefect API answers at `{self.api_url}` ({self._error()}); start that server, "
                "or mend `--api`"
            )

    def _error(self) -> Exception | None:
        with self.client() as client:
            return client.api_healthcheck()

    def missing(self) -> list[str]:
        """Return what the server lacks, in words."""
        with self.client() as client:
            there = {automation.name for automation in client.read_automations()}
            deployed = {deployment.name for deployment in ours(client)}
            try:
                client.read_work_pool(POOL)
                lacks = []
            except ObjectNotFound:
                lacks = [f"work pool `{POOL}`"]
        lacks += [f"deployment `{n}`" for n in deployment_names() if n not in deployed]
        return lacks + [f"automation `{a.name}`" for a in automations() if a.name not in there]

    def apply(self, mark: Path | None = None) -> None:
        """Create what is missing, and renew deployments.

        Args:
            mark: file that tells what was deployed last, to renew only what changed since.

        Raises:
            ServerFailed: `prefect deploy` failed.
        """
        with self.client() as client:
            self._pool(client)
            self._automations(client)
            deployed = {deployment.name for deployment in ours(client)}
            is_current = mark is not None and mark.exists() and mark.read_text() == self._mark()
            if not (is_current and deployed.issuperset(deployment_names())):
                before, triggers = ours(client), client.read_automations()
                self._deploy()
                _restore(client, before)
                _restore_triggers(client, triggers)
                if mark is not None:
                    mark.write_text(self._mark())

    def _pool(self, client: SyncPrefectClient) -> None:
        template = ProcessWorker.get_default_base_job_template()
        pool = WorkPoolCreate(
            name=POOL,
            type="process",
            base_job_template=template,
            description="one worker per GPU, one run at a time on each",
        )
        try:
            client.create_work_pool(pool)
        except ObjectAlreadyExists:
            return

    def _automations(self, client: SyncPrefectClient) -> None:
        there = {automation.name: automation for automation in client.read_automations()}
        for automation in automations():
            if automation.name not in there:
                client.create_automation(automation)

    def _mark(self) -> str:
        """Return what tells deployments of another file, version or folder from ours."""
        text = DEPLOYMENTS.read_bytes() + str(self.folder).encode()
        return f"{version('exl2flow')}-{hashlib.sha256(text).hexdigest()[:12]}"

    def _deploy(self) -> None:
        command = [sys.executable, "-P", "-m", "prefect", "--no-prompt", "deploy", "--all"]
        done = subprocess.run(
            [*command, "--prefect-file", str(DEPLOYMENTS)],
            cwd=self.folder,
            env={**os.environ, "PREFECT_API_URL": self.api_url, "PWD": str(self.folder)},
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).strip().splitlines()
            raise ServerFailed(
                f"`prefect deploy` failed for `{DEPLOYMENTS}`: {' '.join(lines[-3:])}; mend the "
                "file and repeat the command"
            )


def ours(client: SyncPrefectClient) -> list[DeploymentResponse]:
    """Return the deployments of our pool."""
    return [d for d in client.read_deployments(limit=200) if d.work_pool_name == POOL]


def _restore(client: SyncPrefectClient, before: Sequence[DeploymentResponse]) -> None:
    """Give deployments back what was set in the UI: parameters, and schedules with theirs."""
    known = {deployment.id: deployment for deployment in before}
    for now in ours(client):
        then = known.get(now.id)
        if then is None:
            continue
        if then.parameters != now.parameters:
            client.update_deployment(now.id, DeploymentUpdate(parameters=then.parameters))
        set_before = {schedule.slug: schedule for schedule in then.schedules}
        for schedule in now.schedules:
            if schedule.slug and (was := set_before.get(schedule.slug)) is not None:
                client.update_deployment_schedule(
                    now.id,
                    schedule.id,
                    active=was.active,
                    schedule=was.schedule,
                    parameters=was.parameters,
                )


def _restore_triggers(client: SyncPrefectClient, before: Sequence[Automation]) -> None:
    """Give triggers of deployments back what was set: what they start with, and whether."""
    known = {automation.name: automation for automation in before}
    for now in client.read_automations():
        then = known.get(now.name)
        if then is not None and then.id != now.id:  # deploying makes triggers anew
            kept = now.model_copy(update={"enabled": then.enabled, "actions": then.actions})
            client.update_automation(now.id, core(kept))


def core(automation: Automation) -> AutomationCore:
    """Return what of an automation can be set."""
    shown = automation.model_dump(exclude={"id", "owner_resource"})
    return AutomationCore.model_validate(shown)
