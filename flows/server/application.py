"""The application of our servers: Prefect's own, whose SQLite is waited for and which rests more.

Prefect begins most transactions as readers. One that writes after somebody else has written is
refused at once (`database is locked`), whatever the timeout; after four such refusals an event is
dropped, and with it what an automation should have done. One that begins as a writer waits.

Prefect's worker for work of its own looks for some twice in a quarter of a second; what is regular
in that work is due every 5 s or less often. An idle server took 1.8 % of a core for it.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.dependencies import set_database_config
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

LOOK_AGAIN = timedelta(seconds=2)


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
    from prefect.server.api import background_workers, server

    worker = background_workers.Worker  # type: ignore[attr-defined]  # it is imported there
    background_workers.Worker = partial(  # type: ignore[assignment,attr-defined]
        worker, minimum_check_interval=LOOK_AGAIN, scheduling_resolution=LOOK_AGAIN
    )
    return server.create_app()
