"""Rules act on a run that nobody works on, even if they never heard of its state."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from prefect.client.schemas.objects import StateType
from prefect.server.database import provide_database_interface
from prefect.server.database.dependencies import temporary_database_config
from prefect.server.events import triggers
from prefect.server.events.models.automations import create_automation
from prefect.server.events.schemas.automations import Automation, Posture
from prefect.server.events.schemas.events import ReceivedEvent, Resource
from prefect.server.utilities.messaging.memory import Topic
from prefect.types import DateTime

from exl2flow.flows.server.application import PatientSqlite
from exl2flow.flows.server.deployments import rules
from exl2flow.flows.server.reminders import due, remind

PENDING, RUNNING, CRASHED = StateType.PENDING, StateType.RUNNING, StateType.CRASHED
TAG = {"prefect.resource.id": "prefect.tag.exl2flow", "prefect.resource.role": "tag"}
LOST, NEVER_BEGAN = 91, 601  # seconds

Story = Callable[[], Coroutine[None, None, None]]
Given = Callable[[Story], list[str]]
Steps = Callable[[UUID], list[Coroutine[None, None, None]]]


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[asyncio.Runner]:
    """An event loop, as Prefect's triggers live in one, and a database with our rules."""
    file = tmp_path_factory.mktemp("database") / "server.db"
    url = f"sqlite+aiosqlite:///{file}"
    with temporary_database_config(PatientSqlite(connection_url=url)), asyncio.Runner() as runner:
        runner.run(create_rules())
        yield runner
        runner.run(triggers.reset())


async def create_rules() -> None:
    """Create the tables, without Prefect's migrations, and our rules."""
    db = provide_database_interface()
    async with (await db.engine()).begin() as connection:
        every = db.Base.metadata.sorted_tables
        tables = [table for table in every if table.name != "artifact"]  # an index comes twice
        await connection.exec_driver_sql("CREATE TABLE artifact (id CHAR(36) PRIMARY KEY)")
        await connection.run_sync(db.Base.metadata.create_all, tables=tables)
    async with db.session_context(begin_transaction=True) as session:
        for rule in rules():
            await create_automation(session, Automation.model_validate(rule.model_dump()))
    await triggers.reconcile_automations(force=True)


async def add_run(
    kind: StateType, age: float = 60, *, starts: int = 1, deployed: bool = True
) -> UUID:
    """Write a run that has been in this state for so long; the server's events of it are lost."""
    db = provide_database_interface()
    then = DateTime.now("UTC") - timedelta(seconds=age)
    async with db.session_context(begin_transaction=True) as session:
        flow = db.Flow(name=f"convert-{uuid4()}")
        session.add(flow)
        await session.flush()
        deployment = db.Deployment(name="convert", flow_id=flow.id)
        session.add(deployment)
        await session.flush()
        run = db.FlowRun(
            flow_id=flow.id,
            deployment_id=deployment.id if deployed else None,
            tags=["exl2flow"],
            run_count=starts,
            state_type=kind,
            state_name=kind.value.capitalize(),
            state_timestamp=then,
        )
        session.add(run)
        await session.flush()
        state = db.FlowRunState(
            flow_run_id=run.id, type=kind, name=kind.value.capitalize(), timestamp=then, message=""
        )
        run.set_state(state)
        session.add(state)
        return UUID(str(run.id))


async def tell(run: UUID, *names: str, ago: float = 0) -> None:
    """Tell the rules what happened to a run some seconds ago."""
    for name in names:
        then = DateTime.now("UTC") - timedelta(seconds=ago)
        event = ReceivedEvent(
            id=uuid4(),
            occurred=then,
            event=f"prefect.flow-run.{name}",
            resource=Resource({"prefect.resource.id": f"prefect.flow-run.{run}"}),
            related=[TAG],  # type: ignore[list-item]
        )
        await triggers.reactive_evaluation(event)


async def wait(seconds: float) -> None:
    """Let the rules look at all runs after this time."""
    later = DateTime.now("UTC") + timedelta(seconds=seconds)
    for trigger in list(triggers.triggers.values()):
        if trigger.posture == Posture.Proactive:
            await triggers.proactive_evaluation(trigger, later)


@pytest.fixture
def given(loop: asyncio.Runner) -> Iterator[Given]:
    """Return the names of the states that rules give to runs in a story; then forget the runs."""
    heard = Topic.by_name("actions").subscribe()

    def play(story: Story) -> list[str]:
        loop.run(story())
        queued = [heard._queue.get_nowait().data for _ in range(heard._queue.qsize())]
        return [json.loads(data)["action"]["name"] for data in queued]

    yield play
    Topic.by_name("actions").unsubscribe(heard)
    loop.run(forget())


async def forget() -> None:
    """Remove all runs, and what rules wait for."""
    db = provide_database_interface()
    async with db.session_context(begin_transaction=True) as session:
        for table in (db.AutomationBucket, db.FlowRun):
            await session.execute(sa.delete(table))


@pytest.mark.parametrize(
    ("kind", "starts", "steps", "expected"),
    [
        pytest.param(
            PENDING, 1, lambda run: [remind(), wait(NEVER_BEGAN)], ["Requeued"], id="never began"
        ),
        pytest.param(
            RUNNING, 1, lambda run: [remind(), wait(LOST)], ["Crashed"], id="no heartbeat"
        ),
        pytest.param(
            RUNNING,
            1,
            lambda run: [remind(), tell(run, "heartbeat"), wait(LOST - 30)],
            [],
            id="with heartbeats",
        ),
        pytest.param(CRASHED, 1, lambda run: [remind()], ["AwaitingRetry"], id="crashed"),
        pytest.param(CRASHED, 4, lambda run: [remind()], [], id="crashed too often"),
        pytest.param(CRASHED, 0, lambda run: [remind()], ["Requeued"], id="crashed unbegun"),
        pytest.param(
            PENDING,
            0,
            lambda run: [tell(run, *["Requeued"] * 4)],
            ["Failed"],
            id="queued again four times",
        ),
        pytest.param(  # the rule keeps its wait of the first attempt, which has been fulfilled
            PENDING,
            1,
            lambda run: [
                tell(run, "Pending", "Running", ago=300),
                tell(run, "Crashed", "AwaitingRetry", "Pending"),
                wait(NEVER_BEGAN),
            ],
            ["Requeued"],
            id="taken again after a crash",
        ),
        pytest.param(
            PENDING,
            1,
            lambda run: [
                tell(run, "Pending", "Running", ago=NEVER_BEGAN),
                tell(run, "Crashed", "AwaitingRetry", "Pending"),  # only removes the first wait
                remind(),
                wait(NEVER_BEGAN),
            ],
            ["Requeued"],
            id="a fulfilled wait that ran out is followed by another",
        ),
        pytest.param(
            PENDING,
            1,
            lambda run: [tell(run, "Pending", ago=300), remind(), wait(NEVER_BEGAN - 300)],
            ["Requeued"],
            id="reminders do not make a wait longer",
        ),
    ],
)
def test_state_that_rules_give_to_a_run(
    given: Given, kind: StateType, starts: int, steps: Steps, expected: list[str]
) -> None:
    async def story() -> None:
        for step in steps(await add_run(kind, starts=starts)):
            await step

    assert given(story) == expected


@pytest.mark.parametrize(
    ("kind", "age", "deployed", "count"),
    [
        (PENDING, 1e6, True, 1),
        (RUNNING, 1e6, True, 1),
        (CRASHED, 1e4, True, 1),
        (CRASHED, 1e6, True, 0),  # of another day
        (CRASHED, 1, True, 0),  # its own event is about to be processed
        (RUNNING, 60, False, 0),  # of a command or another run
        (StateType.SCHEDULED, 60, True, 0),
        (StateType.COMPLETED, 60, True, 0),
    ],
)
def test_reminders_are_of_runs_of_deployments_that_could_go_on(
    given: Given, kind: StateType, age: float, deployed: bool, count: int
) -> None:
    async def story() -> None:
        await add_run(kind, age, deployed=deployed)
        assert len(await due(DateTime.now("UTC"))) == count

    assert given(story) == []
