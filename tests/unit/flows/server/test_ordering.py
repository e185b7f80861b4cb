"""`events.ordering.memory` of Prefect, and what ours changes: events from before a restart."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from prefect.server.database import provide_database_interface
from prefect.server.database.dependencies import temporary_database_config
from prefect.server.events.ordering import EventArrivedEarly, memory
from prefect.server.events.schemas.events import ReceivedEvent, Resource
from prefect.server.events.storage.database import write_events
from prefect.types import DateTime

from exl2flow.flows.server.application import PatientSqlite
from exl2flow.flows.server.ordering import BEGUN, CausalOrdering


def event(*, received: DateTime, follows: UUID | None = None) -> ReceivedEvent:
    return ReceivedEvent(
        id=uuid4(),
        occurred=received,
        received=received,
        event="prefect.flow-run.Running",
        resource=Resource({"prefect.resource.id": "prefect.flow-run.x"}),
        follows=follows,
    )


EARLIER = event(received=BEGUN - timedelta(minutes=1))
LATER = event(received=BEGUN + timedelta(seconds=1))


@pytest.fixture(scope="module", autouse=True)
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A database that has both events, with tables but without Prefect's migrations."""
    file = tmp_path_factory.mktemp("database") / "server.db"

    async def create() -> None:
        db = provide_database_interface()
        async with (await db.engine()).begin() as connection:
            tables = [db.Event.__table__, db.EventResource.__table__]
            await connection.run_sync(db.Base.metadata.create_all, tables=tables)
        async with db.session_context(begin_transaction=True) as session:
            await write_events(session, [EARLIER, LATER])

    with temporary_database_config(PatientSqlite(connection_url=f"sqlite+aiosqlite:///{file}")):
        asyncio.run(create())
        yield


def wait(ordering: memory.CausalOrdering, leader: ReceivedEvent) -> None:
    follower = event(received=DateTime.now("UTC"), follows=leader.id)
    asyncio.run(ordering.wait_for_leader(follower))


def test_event_that_follows_one_from_before_the_restart_does_not_wait() -> None:
    wait(CausalOrdering(scope="ours"), EARLIER)


def test_event_that_follows_one_still_to_be_processed_waits() -> None:
    with pytest.raises(EventArrivedEarly):
        wait(CausalOrdering(scope="ours-later"), LATER)


def test_prefect_waits_for_both() -> None:
    for name, leader in (("earlier", EARLIER), ("later", LATER)):
        with pytest.raises(EventArrivedEarly):
            wait(memory.CausalOrdering(scope=f"theirs-{name}"), leader)
