"""What users set on a server stays, through upgrades, kills and deleted deployments.

A real Prefect API, without its background services, on a database made for these tests.
"""

import asyncio
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import uvicorn
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import Automation
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import PrefectHTTPStatusError
from prefect.server.api.server import create_api_app
from prefect.server.database import provide_database_interface
from prefect.server.database.dependencies import temporary_database_config
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Scheduled
from prefect.utilities.callables import parameter_schema

from exl2flow import flows
from exl2flow.flows.server import deployments as module
from exl2flow.flows.server import lasting
from exl2flow.flows.server.application import PatientSqlite
from exl2flow.flows.server.deployments import CONFIGS, DEPLOYMENTS, RULES, core, schema
from exl2flow.flows.server.services import Home, ServerSettings
from exl2flow.flows.watch import cancel_same

SWEPT = "exl2flow: a new revision is swept"
MINE = {"config": {"source": "mine", "out": "out", "bpw": [3, 4]}}


async def create_tables() -> None:
    """Create the tables, without Prefect's migrations."""
    db = provide_database_interface()
    async with (await db.engine()).begin() as connection:
        every = db.Base.metadata.sorted_tables
        tables = [table for table in every if table.name != "artifact"]  # an index comes twice
        await connection.exec_driver_sql("CREATE TABLE artifact (id CHAR(36) PRIMARY KEY)")
        await connection.run_sync(db.Base.metadata.create_all, tables=tables)
    await (await db.engine()).dispose()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("database") / "server.db"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where relative paths of runs start."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def url(file: Path, folder: Path) -> Iterator[str]:
    """Address of a server where everything was applied once, with a copy of its database."""
    with (
        temporary_database_config(PatientSqlite(connection_url=f"sqlite+aiosqlite:///{file}")),
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        asyncio.run(create_tables())
        server = uvicorn.Server(
            uvicorn.Config(create_api_app(), lifespan="off", log_level="error", http="h11")
        )
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with temporary_settings({PREFECT_API_URL: url}):
            assert lasting.apply(folder) == []
            copy(file, file.with_suffix(".applied"))
            yield url
        server.should_exit = True
        thread.join()


def copy(source: Path, target: Path) -> None:
    """Copy a database that may be in use."""
    with closing(sqlite3.connect(source)) as read, closing(sqlite3.connect(target)) as write:
        read.backup(write)


@pytest.fixture
def client(url: str, file: Path) -> Iterator[SyncPrefectClient]:
    """A client of that server; what a test changes there is undone."""
    with SyncPrefectClient(url) as client:
        yield client
    copy(file.with_suffix(".applied"), file)


def named(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    return client.read_deployment_by_name(name)


def rule_named(client: SyncPrefectClient, name: str) -> Automation:
    [found] = [rule for rule in client.read_automations() if name in rule.name]
    return found


@pytest.fixture
def newer(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer version of the package, which changes defaults of everything that it writes."""
    content = yaml.safe_load(DEPLOYMENTS.read_text())
    for entry in content["deployments"]:
        entry["description"] = "newer"
        entry["tags"] = ["exl2flow", "newer"]
        entry["concurrency_limit"] = {"limit": 7, "collision_strategy": "ENQUEUE"}
        for timed in entry["schedules"]:
            timed["cron"] = "7 7 * * *"
        for trigger in entry.get("triggers", []):
            trigger["match"] = {"prefect.resource.id": "newer.*"}
    by_name = {entry["name"]: entry for entry in content["deployments"]}
    by_name["sweep"]["parameters"]["config"]["bpw"] = [7]
    by_name["refine"]["schedules"] = [
        {"cron": "7 7 * * *", "timezone": "UTC", "slug": "newer", "active": False}
    ]
    rules = yaml.safe_load(RULES.read_text())
    rules[0]["trigger"]["within"] = 120
    for name, data in (("DEPLOYMENTS", content), ("RULES", rules)):
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(data))
        monkeypatch.setattr(module, name, file)


def test_second_apply_has_nothing_to_do(client: SyncPrefectClient, folder: Path) -> None:
    before = [*client.read_deployments(), *client.read_automations()]

    assert lasting.apply(folder) == []

    assert [*client.read_deployments(), *client.read_automations()] == before


def test_what_prefect_would_deploy_is_what_is_created(
    client: SyncPrefectClient, folder: Path
) -> None:
    content = yaml.safe_load(DEPLOYMENTS.read_text())
    for entry in content["deployments"]:
        found = named(client, f"{entry['entrypoint'].rpartition('.')[2]}/{entry['name']}")
        assert found.parameters == entry["parameters"]
        assert (found.entrypoint, found.tags) == (entry["entrypoint"], entry["tags"])
        assert found.description == entry["description"]
        assert found.enforce_parameter_schema
        [step] = found.pull_steps or []
        assert step == {
            "prefect.deployments.steps.set_working_directory": {"directory": str(folder)}
        }
        slugs = [(timed["slug"], timed["active"]) for timed in entry["schedules"]]
        assert [(timed.slug, timed.active) for timed in found.schedules] == slugs


@pytest.mark.parametrize("name", CONFIGS)
def test_form_is_that_of_the_flow(name: str) -> None:
    loaded = parameter_schema(getattr(flows, name).fn).model_dump_for_openapi()

    assert schema(CONFIGS[name]) == loaded


def user_changes(client: SyncPrefectClient) -> None:
    """Set by hand everything that can be set."""
    sweep, watch = named(client, "sweep/sweep"), named(client, "watch/watch")
    update = DeploymentUpdate(
        parameters=MINE,
        concurrency_limit=1,
        tags=["exl2flow", "mine"],
        description="mine",
        job_variables={"env": {"A": "1"}},
        paused=True,
    )
    client.update_deployment(sweep.id, update)
    weekly = CronSchedule(cron="0 3 * * 0", timezone="Europe/Berlin")
    client.update_deployment_schedule(
        sweep.id, sweep.schedules[0].id, True, weekly, parameters=MINE
    )
    own = DeploymentScheduleCreate(schedule=weekly, active=True, parameters=MINE)
    client.create_deployment_schedules(watch.id, [own])
    client.delete_deployment_schedule(
        named(client, "convert/convert").id, named(client, "convert/convert").schedules[0].id
    )
    trigger = rule_named(client, SWEPT)
    trigger.trigger.match = ResourceSpecification({"prefect.resource.id": "hf.model.my--*"})  # type: ignore[union-attr]
    client.update_automation(trigger.id, core(trigger))
    rule = rule_named(client, "without a heartbeat")
    rule.trigger.threshold, rule.enabled = 3, False  # type: ignore[union-attr]
    client.update_automation(rule.id, core(rule))


OURS = {"updated", "version", "parameter_openapi_schema", "labels", "status", "last_polled"}


def settings_of(client: SyncPrefectClient) -> dict[str, Any]:
    """Return all that users set in `user_changes`."""
    sweep, watch = named(client, "sweep/sweep"), named(client, "watch/watch")
    own = [timed for timed in watch.schedules if timed.slug is None]
    return {
        "sweep": sweep.model_dump(exclude=OURS),
        "own schedules": [timed.model_dump(exclude={"updated"}) for timed in own],
        "convert": named(client, "convert/convert").schedules,
        "trigger": core(rule_named(client, SWEPT)),
        "rule": core(rule_named(client, "without a heartbeat")),
    }


@pytest.mark.usefixtures("newer")
def test_newer_version_keeps_all_that_users_set(client: SyncPrefectClient, folder: Path) -> None:
    user_changes(client)
    before = settings_of(client)

    kept = lasting.apply(folder)

    assert settings_of(client) == before
    assert [text.partition("` ")[0] for text in kept] == [
        "`exl2flow: without a heartbeat a run has crashed",
        f"`{SWEPT}",
    ]


@pytest.mark.usefixtures("newer")
def test_newer_version_renews_what_nobody_changed(client: SyncPrefectClient, folder: Path) -> None:
    user_changes(client)
    lasting.apply(folder)

    watch, refine = named(client, "watch/watch"), named(client, "refine/refine")
    [timed] = [timed for timed in watch.schedules if timed.slug]
    assert (watch.description, watch.tags) == ("newer", ["exl2flow", "newer"])
    assert watch.global_concurrency_limit is not None
    assert watch.global_concurrency_limit.limit == 7
    assert isinstance(timed.schedule, CronSchedule)
    assert timed.schedule.cron == "7 7 * * *"
    assert [timed.slug for timed in refine.schedules] == ["newer"]
    assert named(client, "sweep/on-revision").description == "newer"


@pytest.mark.usefixtures("newer")
def test_defaults_that_nobody_changed_follow_the_newer_version(
    client: SyncPrefectClient, folder: Path
) -> None:
    lasting.apply(folder)

    assert named(client, "sweep/sweep").parameters["config"]["bpw"] == [7]
    assert "newer.*" in str(rule_named(client, SWEPT).trigger)
    heartbeat = rule_named(client, "without a heartbeat").trigger
    assert heartbeat.within.total_seconds() == 120  # type: ignore[union-attr]
    assert lasting.apply(folder) == []


WRITES = (
    "update_deployment",
    "create_deployment",
    "create_automation",
    "update_automation",
    "create_deployment_schedules",
    "update_deployment_schedule",
)


@pytest.mark.slow  # 12 times what `up` does
@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("after", [False, True], ids=["before a request", "after it"])
def test_kill_at_any_request_loses_nothing(
    client: SyncPrefectClient, folder: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    user_changes(client)
    client.delete_deployment(named(client, "publish/publish").id)
    before = settings_of(client)
    left = 0

    def dying(write: Any) -> Any:
        def attempt(self: SyncPrefectClient, *words: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and not after:
                raise KeyboardInterrupt
            done = write(self, *words, **options)
            if left == 0:
                raise KeyboardInterrupt
            return done

        return attempt

    for name in WRITES:
        monkeypatch.setattr(SyncPrefectClient, name, dying(getattr(SyncPrefectClient, name)))
    for kills in range(30):  # each attempt gets further than the one before
        left = kills + 1
        with suppress(KeyboardInterrupt):
            lasting.apply(folder)
            break
        assert settings_of(client) == before

    assert 2 < kills < 29
    assert settings_of(client) == before
    assert named(client, "publish/publish").description == "newer"
    assert named(client, "watch/watch").tags == ["exl2flow", "newer"]


def with_schema(client: SyncPrefectClient, name: str, **properties: Any) -> None:
    """Give a deployment the form of another version."""
    found = named(client, name)
    form = found.parameter_openapi_schema
    assert form is not None
    [config] = [key for key in form["definitions"] if key.endswith(("ConversionConfig",))]
    form["definitions"][config]["properties"] |= properties
    client.update_deployment(found.id, DeploymentUpdate(parameter_openapi_schema=form))


def test_parameters_that_this_version_refuses_are_told_and_others_go_on(
    client: SyncPrefectClient, folder: Path
) -> None:
    with_schema(client, "convert/convert", old_option={"type": "integer"})
    old = {"config": {"source": "mine", "out": "o", "old_option": 2}}
    convert, validate = named(client, "convert/convert"), named(client, "validate/validate")
    client.update_deployment(convert.id, DeploymentUpdate(parameters=old))
    client.delete_deployment(validate.id)

    [told] = lasting.apply(folder)

    assert told.startswith("`convert/convert` stays as it is: this version refuses its parameters")
    assert "old_option" in told
    assert named(client, "convert/convert").parameters == old
    assert named(client, "validate/validate").id != validate.id


def test_form_of_another_version_is_reported_and_renewed(
    client: SyncPrefectClient,
    url: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_schema(client, "convert/convert", old_option={"type": "integer"})
    monkeypatch.setattr(ServerSettings, "api_url", url)
    monkeypatch.setattr(lasting, "answers", lambda url: True)
    place, settings = Home(tmp_path / "home"), ServerSettings(folder=folder)

    def forms() -> list[str]:
        return [text for text in lasting.problems(place, settings) if "form" in text]

    assert forms() == ["`convert` is that of another version, and so is its form"]
    lasting.apply(folder)
    assert forms() == []


def test_deployment_in_another_pool_is_neither_missing_nor_moved_back(
    client: SyncPrefectClient, folder: Path
) -> None:
    pool = WorkPoolCreate(name=f"other-{uuid4()}", type="process")
    client.create_work_pool(pool)
    convert = named(client, "convert/convert")
    client.update_deployment(convert.id, DeploymentUpdate(work_pool_name=pool.name))

    lasting.apply(folder / "elsewhere")

    now = named(client, "convert/convert")
    assert (now.id, now.work_pool_name) == (convert.id, pool.name)
    assert str(folder / "elsewhere") in str(now.pull_steps)


def test_changed_trigger_of_a_deleted_deployment_starts_the_new_one(
    client: SyncPrefectClient, folder: Path
) -> None:
    user_changes(client)
    client.delete_deployment(named(client, "sweep/on-revision").id)

    lasting.apply(folder)

    trigger = rule_named(client, SWEPT)
    [action] = trigger.actions
    assert isinstance(action, RunDeployment)
    assert action.deployment_id == named(client, "sweep/on-revision").id
    assert "my--*" in str(trigger.trigger)


def test_trigger_that_was_deleted_stays_deleted(client: SyncPrefectClient, folder: Path) -> None:
    client.delete_automation(rule_named(client, SWEPT).id)

    lasting.apply(folder / "elsewhere")

    assert not [rule for rule in client.read_automations() if rule.name == SWEPT]


def test_deployments_of_an_earlier_version_or_of_prefect_deploy_keep_everything(
    client: SyncPrefectClient, folder: Path
) -> None:
    for found in client.read_deployments():
        form = dict(found.parameter_openapi_schema or {})
        form.pop(module.RECORD)
        client.update_deployment(
            found.id, DeploymentUpdate(parameter_openapi_schema=form, version="0.1.0-697276850d81")
        )
    for rule in client.read_automations():
        rule.description = rule.description.partition(" (rule")[0] + " (rule 0123abcd)"
        client.update_automation(rule.id, core(rule))
    user_changes(client)
    before = settings_of(client)

    assert len(lasting.apply(folder)) == 2

    now = settings_of(client)
    assert now == before
    assert all(
        module.RECORD in (found.parameter_openapi_schema or {})
        for found in client.read_deployments()
    )


def test_runs_with_new_options_are_accepted_and_wrong_ones_refused(
    client: SyncPrefectClient,
) -> None:
    convert = named(client, "convert/convert")
    config = {"source": "demo/model", "out": "o", "allocate": {"experts": "layer"}}

    run = client.create_flow_run_from_deployment(convert.id, parameters={"config": config})
    with pytest.raises(PrefectHTTPStatusError, match="409"):
        client.create_flow_run_from_deployment(
            convert.id, parameters={"config": {**config, "bpw": 99}}
        )

    assert run.parameters == {"config": config}
    assert [found.id for found in client.read_flow_runs()] == [run.id]


def test_look_cancels_those_that_were_held_up_and_look_at_the_same(
    client: SyncPrefectClient,
) -> None:
    watch = named(client, "watch/watch")
    hour = timedelta(hours=1)

    def due(where: str, when: datetime) -> FlowRun:
        config = {"repositories": [where]}
        return client.create_flow_run_from_deployment(
            watch.id, parameters={"config": config}, state=Scheduled(scheduled_time=when)
        )

    now = datetime.now(UTC)
    first, late = due("org/a", now - 2 * hour), due("org/a", now - hour)
    later, other = due("org/a", now + hour), due("org/b", now - hour)

    cancel_same(client, first)

    states = [client.read_flow_run(run.id).state_name for run in (first, late, later, other)]
    assert states == ["Scheduled", "Cancelled", "Scheduled", "Scheduled"]


def test_forms_are_made_without_torch() -> None:
    """`status` is called often, and loads no flow."""
    script = (
        "import sys; from exl2flow.flows.server.deployments import deployments; "
        "from pathlib import Path; [d.code for d in deployments(Path())]; "
        "sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
