"""The objects that a Prefect server needs for our runs, without loss of what users set there.

Deployments and automations are files in Prefect's own form, `prefect.yaml` (a link to the root of
the repository) and `automations.yaml`. `prefect deploy` would replace a deployment as a whole; here
only values change that are still those which we wrote last. What we wrote is kept on the server:
for a deployment inside the schema of its parameters, in one request with the values themselves, for
an automation as a digest in its description. So nothing depends on a process that may be killed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.objects import ConcurrencyOptions
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events import DeploymentEventTrigger
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.utilities.callables import parameter_schema
from pydantic import BaseModel

from exl2flow.core.options.comparison import Comparison
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.options.watch import WatchConfig

DEPLOYMENTS = Path(__file__).with_name("prefect.yaml")
RULES = Path(__file__).with_name("automations.yaml")
CONFIGS: Mapping[str, type[BaseModel]] = {
    "convert": ConversionConfig,
    "publish": PublishConfig,
    "refine": RefinementConfig,
    "sweep": SweepConfig,
    "validate": Comparison,
    "watch": WatchConfig,
}
RECORD = "x-exl2flow"  # in a deployment's schema: the values that we wrote last
FOLDER = "{{ $PWD }}"
SET_FOLDER = "prefect.deployments.steps.set_working_directory"
# What Prefect has where nothing was set
UNSET: Mapping[str, Any] = {
    "description": None,
    "tags": [],
    "parameters": {},
    "enforce_parameter_schema": True,
    "concurrency": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A deployment of `prefect.yaml`."""

    flow: str
    name: str
    entrypoint: str
    pool: str
    values: dict[str, Any]  # by the keys of UNSET
    schedules: dict[str, dict[str, Any]]  # by slug
    triggers: list[dict[str, Any]]
    pull: list[dict[str, Any]]

    def schema(self, triggers: list[str]) -> dict[str, Any]:
        """Return the schema of the parameters, with the record of what was written."""
        record = {"values": self.values, "schedules": self.schedules, "triggers": triggers}
        return {**schema(CONFIGS[self.flow]), RECORD: record}

    @property
    def code(self) -> dict[str, Any]:
        """The part that always is of this version."""
        triggers = [trigger["name"] for trigger in self.triggers]
        return {
            "entrypoint": self.entrypoint,
            "version": version("exl2flow"),
            "parameter_openapi_schema": self.schema(triggers),
        }


@cache
def schema(config: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a flow's parameters; loading the flow itself would load torch."""

    def flow(config: Any) -> None: ...

    flow.__annotations__ = {"config": config, "return": None}
    return parameter_schema(flow).model_dump_for_openapi()


def deployments(folder: Path) -> list[Deployment]:
    """Return all deployments; relative paths of their runs start in a folder."""
    content: dict[str, Any] = yaml.safe_load(DEPLOYMENTS.read_text(encoding="utf-8"))
    [(step, options)] = content["pull"][0].items()
    where = {name: text.replace(FOLDER, str(folder)) for name, text in options.items()}
    return [
        Deployment(
            flow=entry["entrypoint"].rpartition(".")[2],
            name=entry["name"],
            entrypoint=entry["entrypoint"],
            pool=entry["work_pool"]["name"],
            values={**UNSET, "concurrency": entry.get("concurrency_limit")}
            | {name: entry[name] for name in UNSET if name in entry},
            schedules={
                timed["slug"]: _schedule(DeploymentScheduleCreate.model_validate(_in_form(timed)))
                for timed in entry["schedules"]
            },
            triggers=entry.get("triggers", []),
            pull=[{step: where}],
        )
        for entry in content["deployments"]
    ]


def _in_form(timed: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of `schedules` as the API takes it."""
    times = {name: timed[name] for name in ("cron", "timezone")}
    return {"schedule": times, "active": timed["active"], "slug": timed["slug"]}


def _schedule(found: Any) -> dict[str, Any]:
    """Return what users can set of a schedule."""
    times = found.schedule.model_dump(mode="json")
    return {"schedule": times, "active": found.active, "parameters": found.parameters}


def find(client: SyncPrefectClient, wanted: Deployment) -> DeploymentResponse | None:
    """Return the deployment of this name, whatever its work pool; None if it is missing."""
    try:
        return client.read_deployment_by_name(f"{wanted.flow}/{wanted.name}")
    except ObjectNotFound:
        return None


def create(client: SyncPrefectClient, wanted: Deployment) -> DeploymentResponse:
    """Create a deployment that is missing, but not its triggers."""
    values, limit = dict(wanted.values), wanted.values["concurrency"] or {}
    del values["concurrency"]
    strategy = {name: limit[name] for name in ("collision_strategy",) if name in limit}
    found = client.create_deployment(
        flow_id=client.create_flow_from_name(wanted.flow),
        name=wanted.name,
        version=version("exl2flow"),
        entrypoint=wanted.entrypoint,
        work_pool_name=wanted.pool,
        pull_steps=wanted.pull,
        parameter_openapi_schema=wanted.schema([]),
        schedules=[
            DeploymentScheduleCreate(slug=slug, **timed) for slug, timed in wanted.schedules.items()
        ],
        concurrency_limit=limit.get("limit"),
        concurrency_options=ConcurrencyOptions.model_validate(strategy) if strategy else None,
        **values,
    )
    return client.read_deployment(found)


def untouched(
    now: Mapping[str, Any], written: Mapping[str, Any], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the wanted values that differ from those now, where nobody changed what we wrote."""
    return {
        name: value
        for name, value in wanted.items()
        if now[name] != value and now[name] == written[name]
    }


def outdated(now: DeploymentResponse, wanted: Deployment) -> dict[str, Any]:
    """Return what has to be updated in a deployment, as arguments of `DeploymentUpdate`."""
    written = _record(now).get("values", {})
    changes = untouched(_values(now), {**UNSET, **written}, wanted.values)
    if "concurrency" in changes:
        limit = changes.pop("concurrency") or {}
        changes["concurrency_limit"] = limit.get("limit")
        if "collision_strategy" in limit:
            changes["concurrency_options"] = {"collision_strategy": limit["collision_strategy"]}
    code = {name: value for name, value in wanted.code.items() if getattr(now, name) != value}
    steps = now.pull_steps or []
    is_ours = all(step.keys() == {SET_FOLDER} for step in steps)  # else edited by hand
    moved = {"pull_steps": wanted.pull} if is_ours and steps != wanted.pull else {}
    return {**changes, **code, **moved}


def _record(now: DeploymentResponse) -> dict[str, Any]:
    """Return what we wrote last; empty if an earlier version or `prefect deploy` wrote it."""
    found: dict[str, Any] = (now.parameter_openapi_schema or {}).get(RECORD, {})
    return found


def _values(now: DeploymentResponse) -> dict[str, Any]:
    limit, options = now.global_concurrency_limit, now.concurrency_options
    strategy = {"collision_strategy": options.collision_strategy.value} if options else {}
    own = {name: getattr(now, name) for name in UNSET if name != "concurrency"}
    return {**own, "concurrency": {"limit": limit.limit, **strategy} if limit else None}


def renew(client: SyncPrefectClient, now: DeploymentResponse, wanted: Deployment) -> list[str]:
    """Bring a deployment up to date; return in words what could not be renewed.

    What has been renewed is recorded last: after a kill in between, everything is repeated.
    """
    changes = outdated(now, wanted)
    if not changes:
        return []
    record = _record(now)
    _renew_schedules(client, now, record.get("schedules", wanted.schedules), wanted)
    kept = []
    for trigger in wanted.triggers:
        rule = _of_trigger(trigger, now)
        is_deleted = trigger["name"] in record.get("triggers", [trigger["name"]])
        kept += renew_rule(client, rule, create=not is_deleted)
    try:
        client.update_deployment(now.id, DeploymentUpdate(**changes))
    except PrefectHTTPStatusError as error:
        if error.response.status_code not in (400, 409, 422):
            raise
        kept.append(
            f"`{wanted.flow}/{wanted.name}` stays as it is: this version refuses its parameters "
            f"({_detail(error)}); correct them in the UI under Deployments, then repeat the command"
        )
    return kept


def _detail(error: PrefectHTTPStatusError) -> str:
    try:
        detail = error.response.json().get("detail", "")
    except ValueError:
        detail = error.response.text
    lines = str(detail).removeprefix("Error updating deployment: ").splitlines()
    return next((line for line in lines if line.strip()), "no reason given").rstrip(".")


def _renew_schedules(
    client: SyncPrefectClient,
    now: DeploymentResponse,
    written: Mapping[str, Any],
    wanted: Deployment,
) -> None:
    """Update schedules that users left as they were, and create new ones; deleted ones stay so."""
    existing = {found.slug: found for found in now.schedules}
    for slug, timed in wanted.schedules.items():
        if slug not in existing:
            if slug not in written:
                added = DeploymentScheduleCreate(slug=slug, **timed)
                client.create_deployment_schedules(now.id, [added])
            continue
        found = existing[slug]
        if _schedule(found) == written.get(slug) != timed:
            given = DeploymentScheduleCreate(slug=slug, **timed)
            client.update_deployment_schedule(
                now.id, found.id, given.active, given.schedule, parameters=given.parameters
            )


def rules() -> list[AutomationCore]:
    """Return the rules that keep runs going."""
    content = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [marked(AutomationCore.model_validate(rule)) for rule in content]


def _of_trigger(trigger: dict[str, Any], owner: DeploymentResponse) -> AutomationCore:
    """Return the automation that a trigger of a deployment stands for."""
    made = DeploymentEventTrigger.model_validate(trigger)
    made.set_deployment_id(owner.id)
    return marked(made.as_automation())


def _digest(rule: AutomationCore) -> str:
    """Return a digest of what a rule does."""
    content = rule.model_dump(include={"trigger", "actions"})
    text = json.dumps(content, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def marked(rule: AutomationCore) -> AutomationCore:
    """Return a rule whose description ends with its digest, which tells ours from a changed one."""
    text = f"{rule.description} (rule {_digest(rule)})".strip()
    return rule.model_copy(update={"description": text})


def _is_ours(found: Automation) -> bool:
    """Return whether nobody changed an automation since we wrote it.

    Earlier versions wrote a shorter digest, of the file, which cannot be compared.
    """
    return found.description.endswith(f"(rule {_digest(found)})")


def renew_rule(client: SyncPrefectClient, rule: AutomationCore, *, create: bool) -> list[str]:
    """Create an automation, or renew one that nobody changed; one that is off stays off.

    Return in words what a user changed and this version would change as well.
    """
    found = client.read_automations_by_name(rule.name)
    if not found:
        if create:
            client.create_automation(rule)
        return []
    now = found[0]
    if now.description == rule.description:
        return []
    if _digest(now) != _digest(rule) and not _is_ours(now):
        _point_again(client, now, rule)
        return [
            f"`{now.name}` stays as you changed it, though this version has another rule of that "
            "name; delete yours in the UI under Automations and repeat the command to have it"
        ]
    given = {name: getattr(rule, name) for name in ("description", "trigger", "actions")}
    client.update_automation(now.id, core(now.model_copy(update=given)))
    return []


def _point_again(client: SyncPrefectClient, now: Automation, rule: AutomationCore) -> None:
    """Have a changed trigger start the deployment that was created anew, where its own is gone."""
    wanted = next((a for a in rule.actions if isinstance(a, RunDeployment)), None)
    for action in now.actions:
        if wanted is None or not isinstance(action, RunDeployment) or action.deployment_id is None:
            continue
        try:
            client.read_deployment(action.deployment_id)
        except ObjectNotFound:
            action.deployment_id = wanted.deployment_id
            client.update_automation(now.id, core(now))


def core(automation: Automation) -> AutomationCore:
    """Return the part of an automation that can be set."""
    return AutomationCore.model_validate(automation.model_dump(exclude={"id", "owner_resource"}))
