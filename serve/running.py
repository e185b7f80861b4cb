"""Run an application until a signal ends it, when answers have had some time."""

import asyncio
import logging
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from exl2flow.serve.engine import Engine
from exl2flow.serve.guard import LARGEST_HEADERS, Connection

log = logging.getLogger("exl2flow.serve")
KEEP_ALIVE_SECONDS = 60
BACKLOG_SECONDS = 5  # for last writes, once all texts have ended


class _Server(uvicorn.Server):
    """Drains the engine at the first signal, and ends at once at the second."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See `uvicorn.Server`; signals are not raised again, so the program ends with 0."""
        if self._engine.state == "draining" or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self._engine.state = "draining"
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._draining = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        await self._engine.drain(self._engine.options.drain)
        self.should_exit = True


def run(app: FastAPI, engine: Engine, listener: socket.socket) -> None:
    """Answer until a signal comes; addresses and headers are not logged."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=BACKLOG_SECONDS,
        h11_max_incomplete_event_size=LARGEST_HEADERS,
    )
    _Server(config, engine).run([listener])
