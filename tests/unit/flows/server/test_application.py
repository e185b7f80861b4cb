"""Concurrent transactions that read, then write: ours wait, those of Prefect are refused."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from prefect.server.database.configurations import AioSqliteConfiguration

from exl2flow.flows.server.application import PatientSqlite

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
print(type(provide_database_interface().database_config).__name__)
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

    assert done.stdout == "PatientSqlite\n", done.stderr
