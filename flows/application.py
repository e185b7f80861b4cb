"""The application of a lasting server: Prefect's own, whose SQLite is waited for.

Prefect begins most transactions as readers. One that writes after somebody else has written is
refused at once (`database is locked`), whatever the timeout; after four such refusals an event is
dropped, and with it what an automation should have done. One that begins as a writer waits.
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
    from prefect.server.api.server import create_app

    return create_app()
