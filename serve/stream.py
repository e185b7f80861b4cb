"""Answers over HTTP that end with their clients: prepared bytes of SSE, and plain JSON.

Nothing here rests on the framework's notice of disconnects, which plain handlers never get.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


def sse(value: Mapping[str, Any]) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


def sse_head(value: Mapping[str, Any]) -> bytes:
    """Return the beginning of an event, up to the value of its last key, `choices`."""
    head = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return b"data: " + head[:-1] + b', "choices": '


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of some work, which is cancelled when the client leaves.

    Raises:
        ClientLeft: it did.
    """
    return await _race(work, request.receive)


async def _race(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of prepared bytes, whose source is closed when the client leaves."""

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[bytes],
        *,
        headers: Mapping[str, str],
        on_leave: Callable[[], object],
    ) -> None:
        super().__init__(headers={**HEADERS, **headers})
        del self.headers["content-length"]
        self._source, self._on_leave = source, on_leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            await _race(self._write(send), receive)
        except ClientLeft:
            self._on_leave()
        finally:
            await self._source.aclose()

    async def _write(self, send: Callable[[Any], Awaitable[None]]) -> None:
        async for piece in self._source:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        with suppress(OSError):
            await send({"type": "http.response.body", "body": b""})
