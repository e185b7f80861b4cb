"""Concurrent writers wait for each other, events that come twice are stored once.

The tests of Prefect itself show what is changed.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy as sa
from prefect.server.database import provide_database_interface
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.dependencies import temporary_database_config
from prefect.server.events.schemas.events import ReceivedEvent, Resource
from prefect.server.events.storage import database as storage
from prefect.types import DateTime

from exl2flow.flows.server.application import PatientSqlite, write_new_events

WRITERS = 4


async def rows_written(config: AioSqliteConfiguration) -> int:
    """Return how many of the writers wrote."""
    engine = await config.engine()
    try:
        async with engine.begin() as connection:
            await connection.exec_driver_sql("CREATE TABLE seen (reader INTEGER)")

        async def read_then_write() -> None:
            async with (
                await config.session(engine) as session,
                config.begin_transaction(session),
            ):
                await session.execute(sa.text("SELECT count(*) FROM seen"))
                await asyncio.sleep(0.1)  # others read meanwhile, if they may
                await session.execute(sa.text("INSERT INTO seen VALUES (1)"))

        writers = (read_then_write() for _ in range(WRITERS))
        for error in await asyncio.gather(*writers, return_exceptions=True):  # all have ended
            if error is not None:
                raise error
        async with engine.connect() as connection:
            found = await connection.exec_driver_sql("SELECT count(*) FROM seen")
            return int(found.scalar_one())
    finally:
        await engine.dispose()


SHOW = """
from prefect.server.database import provide_database_interface
from exl2flow.flows.server.application import create_app

create_app()
from prefect.server.events.storage import database

print(type(provide_database_interface().database_config).__name__)
print(database._write_sqlite_events.__name__)
"""


def url_of(folder: Path) -> str:
    return f"sqlite+aiosqlite:///{folder / 'server.db'}"


def test_writers_wait_for_each_other(tmp_path: Path) -> None:
    assert asyncio.run(rows_written(PatientSqlite(connection_url=url_of(tmp_path)))) == WRITERS


def test_prefect_refuses_them(tmp_path: Path) -> None:
    with pytest.raises(sa.exc.OperationalError, match="database is locked"):
        asyncio.run(rows_written(AioSqliteConfiguration(connection_url=url_of(tmp_path))))


def test_application_uses_them(tmp_path: Path) -> None:
    """Prefect's `set_database_config` takes effect for the application made after it."""
    env = {**os.environ, "PREFECT_SERVER_DATABASE_CONNECTION_URL": url_of(tmp_path)}

    done = subprocess.run([sys.executable, "-c", SHOW], env=env, capture_output=True, text=True)

    assert done.stdout == "PatientSqlite\nwrite_new_events\n", done.stderr


def event() -> ReceivedEvent:
    return ReceivedEvent(
        id=uuid4(),
        occurred=DateTime.now("UTC"),
        received=DateTime.now("UTC"),
        event="prefect.flow-run.heartbeat",
        resource=Resource({"prefect.resource.id": "prefect.flow-run.x"}),
    )


async def events_stored(*flushes: Sequence[ReceivedEvent]) -> int:
    """Return how many events the database has after these were written to it."""
    db = provide_database_interface()
    async with (await db.engine()).begin() as connection:
        tables = [db.Event.__table__, db.EventResource.__table__]
        await connection.run_sync(db.Base.metadata.create_all, tables=tables)
    for events in flushes:
        async with db.session_context(begin_transaction=True) as session:
            await storage.write_events(session, list(events))
    async with db.session_context() as session:
        return len((await session.scalars(sa.select(db.Event.id))).all())


MANY = [event() for _ in range(100)]  # more than are inserted together


def test_events_that_come_again_after_a_restart_are_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_write_sqlite_events", write_new_events)
    new = [event(), event()]

    with temporary_database_config(PatientSqlite(connection_url=url_of(tmp_path))):
        stored = asyncio.run(events_stored(MANY, [*MANY, *new, new[0]], new))

    assert stored == len(MANY) + len(new)


def test_prefect_refuses_all_that_come_with_them(tmp_path: Path) -> None:
    with (
        temporary_database_config(PatientSqlite(connection_url=url_of(tmp_path))),
        pytest.raises(sa.exc.IntegrityError, match=r"NOT NULL constraint failed: events\.occurred"),
    ):
        asyncio.run(events_stored(MANY, [*MANY, event()]))
