"""The application of our servers: Prefect's own, with two changes.

Browsers let any web page open a WebSocket, whatever the CORS settings, and Prefect's WebSockets
carry events and log lines: connections from other pages are refused.

Prefect begins most transactions as readers. SQLite refuses a reader that writes after another
transaction has written (`database is locked`), whatever the timeout; after four refusals Prefect
drops an event, and with it the action of an automation. A transaction that begins as a writer
waits instead. Upstream: https://github.com/PrefectHQ/prefect/issues/18934
"""

from typing import Any
from urllib.parse import urlsplit

from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.dependencies import set_database_config
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
    from prefect.server.api import server

    app = server.create_app()
    app.add_middleware(OwnPages)
    return app
