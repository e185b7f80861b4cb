"""The application of our servers: Prefect's own, with SQLite transactions that wait.

Prefect begins most transactions as readers. SQLite refuses a reader that writes after another
transaction has written (`database is locked`), whatever the timeout; after four refusals Prefect
drops an event, and with it what an automation should have done. A transaction that begins as a
writer waits instead. Upstream: https://github.com/PrefectHQ/prefect/issues/18934
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.dependencies import set_database_config
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


class PatientSqlite(AioSqliteConfiguration):
    """SQLite with transactions that lock when they begin."""

    @asynccontextmanager
    async def begin_transaction(
        self, session: AsyncSession, with_for_update: bool = False
    ) -> AsyncGenerator[AsyncSessionTransaction, None]:
        """See `BaseDatabaseConfiguration`."""
        async with super().begin_transaction(session, with_for_update=True) as transaction:
            yield transaction


def create_app() -> Any:
    """Return the ASGI application; called once in a process that serves it."""
    url = PREFECT_API_DATABASE_CONNECTION_URL.value()
    if url is not None and url.startswith("sqlite"):
        set_database_config(PatientSqlite(connection_url=url))
    from prefect.server.api import server

    return server.create_app()
