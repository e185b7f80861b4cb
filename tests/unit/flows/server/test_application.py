"""Concurrent writers wait for each other, events are stored once, pages ask no other host.

The tests of Prefect itself show what is changed.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from httpx import ASGITransport, AsyncClient, Response
from prefect.server.database import provide_database_interface
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.dependencies import temporary_database_config
from prefect.server.events.schemas.events import ReceivedEvent, Resource
from prefect.server.events.storage import database as storage
from prefect.types import DateTime
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.responses import Response as Answer

from exl2flow.flows.server.application import (
    TO_LOGIN,
    Login,
    PatientSqlite,
    content_security_policy,
    write_new_events,
)

WRITERS = 4


async def rows_written(config: AioSqliteConfiguration) -> int:
    """Return how many of the writers wrote."""
    engine = await config.engine()
    try:
        async with engine.begin() as connection:
            await connection.exec_driver_sql("CREATE TABLE seen (reader INTEGER)")

        async def read_then_write() -> None:
            async with await config.session(engine) as session, config.begin_transaction(session):
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

app = create_app()
from prefect.server.events.storage import database
from starlette.testclient import TestClient

print(type(provide_database_interface().database_config).__name__)
print(database._write_sqlite_events.__name__)
client = TestClient(app)
for path in ("/", "/runs", "/v2/", "/v2/runs", "/docs", "/nowhere", "/api/health", "/api/nowhere"):
    answer = client.get(path, headers={"Accept": "text/html"})
    leads = "/login?redirect=" in answer.text
    print(path, answer.status_code, leads, answer.headers.get_list("content-security-policy"))
"""


def url_of(folder: Path) -> str:
    return f"sqlite+aiosqlite:///{folder / 'server.db'}"


def test_writers_wait_for_each_other(tmp_path: Path) -> None:
    assert asyncio.run(rows_written(PatientSqlite(connection_url=url_of(tmp_path)))) == WRITERS


def test_prefect_refuses_them(tmp_path: Path) -> None:
    with pytest.raises(sa.exc.OperationalError, match="database is locked"):
        asyncio.run(rows_written(AioSqliteConfiguration(connection_url=url_of(tmp_path))))


def test_application_uses_them_and_each_page_carries_its_policy_and_leads_to_the_login(
    tmp_path: Path,
) -> None:
    """Prefect's `set_database_config` takes effect for the application made after it."""
    env = {**os.environ, "PREFECT_SERVER_DATABASE_CONNECTION_URL": url_of(tmp_path)}
    env["PREFECT_UI_API_URL"] = "http://127.0.0.1:4200/api"
    env["PREFECT_SERVER_API_AUTH_STRING"] = "exl2flow:secret"

    done = subprocess.run([sys.executable, "-c", SHOW], env=env, capture_output=True, text=True)

    database, events, *pages = done.stdout.splitlines()
    assert (database, events) == ("PatientSqlite", "write_new_events"), done.stderr
    policy = [content_security_policy(env["PREFECT_UI_API_URL"])]
    assert len(pages) == 8, done.stderr
    assert all(page.endswith(f" {policy}") for page in pages), pages
    leading = [page.split()[0] for page in pages if page.split()[2] == "True"]
    assert leading == ["/runs", "/nowhere"]  # `/` is a page of the second UI here


PAGE = b"<html><head><title></title></head></html>"


async def page(app: Any) -> Response:
    async with AsyncClient(transport=ASGITransport(app), base_url="http://server") as client:
        return await client.get("/runs/flow-run/1")


def test_page_without_a_session_leads_to_the_login_and_back() -> None:
    answer = asyncio.run(page(Login(HTMLResponse(PAGE, headers={"etag": "1"}))))

    assert answer.content == PAGE.replace(b"<head>", b"<head>" + TO_LOGIN)
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert "etag" not in answer.headers


@pytest.mark.parametrize(
    "other", [HTMLResponse(b"<p>"), PlainTextResponse(PAGE), HTMLResponse(PAGE, 404)]
)
def test_what_is_no_page_stays_as_it_is(other: Answer) -> None:
    answer = asyncio.run(page(Login(other)))

    assert answer.content == bytes(other.body)
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_policy_allows_the_server_and_its_api_and_no_other_host() -> None:
    policy = content_security_policy("https://models.example:8443/api")
    default, base, form = policy.split("; ")

    hosts = {word for word in default.split() if "://" in word}
    assert default.startswith("default-src 'self' ")
    assert hosts == {"https://models.example:8443", "wss://models.example:8443"}
    assert (base, form) == ("base-uri 'self'", "form-action 'self'")
    assert "://" not in content_security_policy(None)


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
