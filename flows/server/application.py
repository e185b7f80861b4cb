"""The application of our servers: Prefect's own, with six changes.

Browsers let any web page open a WebSocket, whatever the CORS settings, and Prefect's WebSockets
carry events and log lines: connections from other pages are refused.

Some of Prefect's pages ask a host of an analytics service for settings, even if analytics are off.
A Content-Security-Policy makes browsers refuse all hosts but the server and its API.

Prefect begins most transactions as readers. SQLite refuses a reader that writes after another
transaction has written (`database is locked`), whatever the timeout; after four refusals Prefect
drops an event, and with it the action of an automation. A transaction that begins as a writer
waits instead. Upstream: https://github.com/PrefectHQ/prefect/issues/18934

After a restart of the server, its clients send some events again. On SQLite, Prefect 3.8 fails to
write what holds the same event twice, or none that is new in about 20 that it inserts together, and
after five attempts drops all that were to be written with them. Only new events are written here.

Prefect's pages lead a browser without a session to the login from `/` only; the address of a run,
as logs print it, ends in "Page not found". A server cannot see the session, which is in the
browser's storage, so each page begins with a script that leads to the login and back.

A server that is killed loses the events that it has not processed: `reminders` makes up for them.
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
from prefect.server.services.perpetual_services import perpetual_service
from prefect.settings import (
    PREFECT_API_DATABASE_CONNECTION_URL,
    PREFECT_SERVER_API_AUTH_STRING,
    PREFECT_SERVER_CORS_ALLOWED_ORIGINS,
    PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED,
    PREFECT_UI_API_URL,
    PREFECT_UI_SERVE_BASE,
)
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exl2flow.flows.server.reminders import remind

HEAD = b"<head>"
# dropped from page requests: pages must come uncompressed and whole to carry the script
NOT_ACCEPTED = (b"accept-encoding", b"if-none-match", b"if-modified-since")
TO_LOGIN = b"""<script>
if (!localStorage.getItem("prefect-password") && location.pathname !== "/login")
  location.replace("/login?redirect=" + encodeURIComponent(location.pathname + location.search));
</script>"""


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


def content_security_policy(api_url: str | None) -> str:
    """Return the header with which browsers load our pages from the server and its API only.

    Prefect's pages have inline styles, plots in `data:` URLs, workers from `blob:` URLs, and graphs
    whose shaders and formulas are compiled in the page.
    """
    sources = ["'self'", "'unsafe-inline'", "'unsafe-eval'", "data:", "blob:"]
    api = urlsplit(api_url or "")
    if api.netloc:  # not always that of the page: pages at `localhost` ask 127.0.0.1
        websocket = api.scheme.replace("http", "ws")
        sources += [f"{scheme}://{api.netloc}" for scheme in (api.scheme, websocket)]
    return f"default-src {' '.join(sources)}; base-uri 'self'; form-action 'self'"


class Login:
    """Middleware that has the pages of the first UI ask for the password before anything else."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or scope["path"].startswith(("/api", "/docs", "/v2")):
            await self.app(scope, receive, send)
            return
        accepted = [row for row in scope["headers"] if row[0] not in NOT_ACCEPTED]
        scope = {**scope, "headers": accepted} if _is_navigation(scope) else scope
        start: Message | None = None  # of a page, held until its body is known

        async def send_with_login(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_page(message):
                start = message
                return
            if start is not None:
                _insert_login(start, message)
                await send(start)
                start = None
            await send(message)

        await self.app(scope, receive, send_with_login)


def _is_navigation(scope: Scope) -> bool:
    return "text/html" in Headers(scope=scope).get("accept", "")


def _is_page(start: Message) -> bool:
    return start["status"] == 200 and Headers(raw=start["headers"]).get(
        "content-type", ""
    ).startswith("text/html")


def _insert_login(start: Message, body: Message) -> None:
    """Insert the script into the first part of a page, unless it has no head, as for HEAD."""
    content = body.get("body", b"")
    if HEAD not in content:
        return
    body["body"] = content.replace(HEAD, HEAD + TO_LOGIN, 1)
    headers = MutableHeaders(scope=start)
    if "content-length" in headers:
        headers["content-length"] = str(int(headers["content-length"]) + len(TO_LOGIN))
    for name in ("etag", "last-modified"):  # those of the file without the script
        del headers[name]


class OwnPages:
    """Middleware between our pages and others.

    It refuses WebSockets of web pages that CORS would refuse, and has browsers refuse foreign hosts
    that our pages ask.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.origins = PREFECT_SERVER_CORS_ALLOWED_ORIGINS.value().split(",")
        self.policy = content_security_policy(PREFECT_UI_API_URL.value())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; one that does not come from a browser has no origin."""

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Content-Security-Policy"] = self.policy
            await send(message)

        headers = Headers(scope=scope) if scope["type"] == "websocket" else {}
        origin, host = headers.get("origin"), headers.get("host")
        if origin is None or origin in self.origins or urlsplit(origin).netloc == host:
            await self.app(scope, receive, send_with_policy)
        else:
            await send({"type": "websocket.close", "code": 1008})


def create_app() -> Any:
    """Return the ASGI application; called once in a process that serves it."""
    url = PREFECT_API_DATABASE_CONNECTION_URL.value()
    if url is not None and url.startswith("sqlite"):
        set_database_config(PatientSqlite(connection_url=url))
    storage._write_sqlite_events = write_new_events
    perpetual_service(enabled_getter=PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED.value)(remind)
    from prefect.server.api import server

    app = server.create_app()
    if PREFECT_SERVER_API_AUTH_STRING.value() and PREFECT_UI_SERVE_BASE.value() == "/":
        app.add_middleware(Login)
    app.add_middleware(OwnPages)
    return app
