"""The application of our servers: Prefect's own, with three changes.

Browsers let any web page open a WebSocket, whatever the CORS settings, and Prefect's WebSockets
carry events and log lines: connections from other pages are refused.

Prefect begins most transactions as readers. SQLite refuses a reader that writes after another
transaction has written (`database is locked`), whatever the timeout; after four refusals Prefect
drops an event, and with it the action of an automation. A transaction that begins as a writer
waits instead. Upstream: https://github.com/PrefectHQ/prefect/issues/18934

After a restart of the server, its clients send some events again. On SQLite, Prefect 3.8 fails to
write what holds the same event twice, or none that is new in about 20 that it inserts together, and
after five attempts drops all that were to be written with them. Only new events are written here.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa
from prefect.server.database import provide_database_interface
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.dependencies import set_database_config
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.server.events.storage import database as storage
from prefect.settings import (
    PREFECT_API_DATABASE_CONNECTION_URL,
    PREFECT_SERVER_CORS_ALLOWED_ORIGINS,
)
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send


class PatientSqlite(AioSqliteConfiguration):
    """SQLite with transactions that lock when they begin."""

    def begin_transaction(self, session: AsyncSession, with_for_update: bool = False) -> Any:
        """See `BaseDatabaseConfiguration`."""
        return super().begin_transaction(session, with_for_update=True)


_write: Any = storage._write_sqlite_events  # a decorator of Prefect hides its type


async def write_new_events(session: AsyncSession, events: Sequence[ReceivedEvent]) -> None:
    """Write the events that are not stored yet, each once."""
    table = provide_database_interface().Event
    for batch in storage._in_safe_batches(list({event.id: event for event in events}.values())):
        ids = [event.id for event in batch]
        stored = set(await session.scalars(sa.select(table.id).where(table.id.in_(ids))))
        if new := [event for event in batch if event.id not in stored]:
            await _write(session, new)


class OwnPages:
    """Middleware that refuses WebSockets of web pages that CORS would refuse."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.origins = PREFECT_SERVER_CORS_ALLOWED_ORIGINS.value().split(",")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; one that does not come from a browser has no origin."""
        headers = Headers(scope=scope) if scope["type"] == "websocket" else {}
        origin, host = headers.get("origin"), headers.get("host")
        if origin is None or origin in self.origins or urlsplit(origin).netloc == host:
            await self.app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})


def create_app() -> Any:
    """Return the ASGI application; called once in a process that serves it."""
    url = PREFECT_API_DATABASE_CONNECTION_URL.value()
    if url is not None and url.startswith("sqlite"):
        set_database_config(PatientSqlite(connection_url=url))
    storage._write_sqlite_events = write_new_events
    from prefect.server.api import server

    app = server.create_app()
    app.add_middleware(OwnPages)
    return app
