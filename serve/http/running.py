"""Run an application until a signal ends it, when answers have had some time.

Connections end on which a client does not make progress, and the oldest idle one for a new one.
A service manager is told how the server is, by the protocol of sd_notify(3).
"""

import asyncio
import json
import math
import signal
import socket
import time
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Literal, NamedTuple

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from exl2flow.core.options.environment import notify_socket
from exl2flow.core.runtime.collection import only_new_are_collected
from exl2flow.serve.errors import ApiError, body
from exl2flow.serve.hosts.models import Models
from exl2flow.serve.hosts.reloading import Configuration

KEEP_ALIVE_SECONDS = 60
TICKS = 10  # of uvicorn's server in a second
BACKLOG_SECONDS = 5  # for last writes, once all texts have ended
State = Literal["stalled", "headers", "idle", "busy"]
# seconds without headers, and without a byte that the client takes
LIMITS: dict[State, float] = {"headers": 10.0, "stalled": 60.0}
MOST_CONNECTIONS = 256
LARGEST_UNREAD = 64 << 10  # bytes of headers before the application counts them


class _Seen(NamedTuple):
    """A connection's state when it was looked at, since when, in which request, and bytes left."""

    state: State
    since: float
    cycle: object
    unsent: int


class Connection(H11Protocol):
    """A connection as the server looks at it; `number` counts them in the order of arrival."""

    _numbers = count()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """See `H11Protocol`."""
        super().connection_made(transport)
        self.number = next(self._numbers)

    def send_400_response(self, msg: str) -> None:
        """See `H11Protocol`: answer what is not HTTP in our form."""
        super().send_400_response(json.dumps(body(ApiError(400, msg))))

    def seen(self, before: _Seen | None, now: float) -> _Seen:
        """Return what it does."""
        unsent, cycle = self.transport.get_write_buffer_size(), self.cycle
        is_idle = cycle is None or cycle.response_complete or cycle.more_body
        is_asking = cycle is None or bool(self.conn.trailing_data[0])
        state: State = "idle" if is_idle else "busy"
        if unsent:
            state = "stalled"
        elif is_asking and self.conn.their_state is h11.IDLE:
            state = "headers"
        if before and before.state == state and before.cycle is cycle and before.unsent <= unsent:
            return before._replace(unsent=unsent)
        return _Seen(state, now, cycle, unsent)


class _Server(uvicorn.Server):
    """Drains the models at the first signal, and ends at once at the second."""

    def __init__(
        self, config: uvicorn.Config, models: Models, configuration: Configuration | None
    ) -> None:
        super().__init__(config)
        self._models, self._deadline = models, 0.0
        self._configuration, self._is_hung_up, self._progress = configuration, False, -1
        self._seen = dict[Connection, _Seen]()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See `uvicorn.Server`; signals are not raised again, so the program ends with 0."""
        notify("STOPPING=1")
        self.should_exit = self.force_exit = self._models.is_draining
        self._models.drain()
        self._deadline = time.monotonic() + self._models.options.drain

    async def on_tick(self, counter: int) -> bool:
        """See `uvicorn.Server`, which calls this ten times a second."""
        self._end_connections()
        self._models.tick()
        if self._configuration is not None:
            self._reload(self._configuration, is_due=counter % TICKS == 0)
        if counter % TICKS == 0:
            self._watch()
        is_over = not self._models.count or time.monotonic() > self._deadline
        if self._models.is_draining and is_over:
            self._models.cancel()
            self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        if self._configuration is not None:
            signal.signal(signal.SIGHUP, self._hang_up)
        await super().startup(sockets)
        notify("READY=1", f"STATUS=serving {self._models.name}")

    def _hang_up(self, signum: int, frame: FrameType | None) -> None:
        self._is_hung_up = True

    def _reload(self, configuration: Configuration, *, is_due: bool) -> None:
        if self._is_hung_up:
            self._is_hung_up = False
            notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
            configuration.reload()
            notify("READY=1")
        elif is_due:
            configuration.look()

    def _watch(self) -> None:
        """Tell that the generator makes progress, or has nothing to do."""
        progress = self._models.progress
        if self._models.state != "failed" and (progress is None or progress != self._progress):
            notify("WATCHDOG=1")
        self._progress = -1 if progress is None else progress

    def _end_connections(self) -> None:
        now, before, connections = time.monotonic(), self._seen, self.server_state.connections
        ours = [one for one in connections if isinstance(one, Connection)]
        self._seen = {one: one.seen(before.get(one), now) for one in ours}
        rows = sorted(self._seen.items(), key=lambda row: (row[1].since, row[0].number))
        ended = [one for one, seen in rows if now - seen.since > LIMITS.get(seen.state, math.inf)]
        idle = [one for one, seen in rows if seen.state in ("headers", "idle")]
        for one in {*ended, *idle[: max(0, len(rows) - MOST_CONNECTIONS)]}:
            one.transport.abort()


def notify(*lines: str) -> None:
    """Tell the service manager about this process, if there is one: sd_notify(3)."""
    if address := notify_socket():
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.connect(address.replace("@", "\0", 1) if address[0] == "@" else address)
            out.send("\n".join(lines).encode(), socket.MSG_DONTWAIT)


def run(
    app: FastAPI,
    models: Models,
    listener: socket.socket,
    configuration: Configuration | None = None,
) -> None:
    """Answer until a signal comes; addresses and headers are not logged.

    With a configuration, SIGHUP reads it again.
    """
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=BACKLOG_SECONDS,
        h11_max_incomplete_event_size=LARGEST_UNREAD,
    )
    only_new_are_collected()
    _Server(config, models, configuration).run([listener])
