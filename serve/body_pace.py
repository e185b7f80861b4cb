"""Spreads the parsing of large bodies over time, so that running texts go on beside it.

Parsing and validating hold the interpreter, whatever thread does it, so what one body takes is
bounded in `bounds`, and here what all of them take together.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from exl2flow.core.runtime.turns import Turns

SHARE = 1 / 10  # of the time, at most, that large bodies are parsed
SMALL = 0.005  # seconds; what takes less is parsed at once
SECONDS_PER_BYTE, SECONDS_PER_VALUE = 8e-9, 4e-7  # measured: one long text; lists of numbers


def seconds_of(data: bytes) -> float:
    """Return about how long a body takes to be parsed and validated."""
    return len(data) * SECONDS_PER_BYTE + sum(map(data.count, b",[{")) * SECONDS_PER_VALUE


class BodyPace:
    """One large body at a time, and a pause behind it; clients take turns."""

    def __init__(self) -> None:
        self._turns, self._free_at = Turns(1), 0.0

    async def wait(self, client: str, seconds: float) -> None:
        """Wait until a body that takes some seconds may be parsed."""
        if seconds < SMALL:
            return
        async with self._turns.of(client):
            now = asyncio.get_running_loop().time
            await asyncio.sleep(self._free_at - now())
            self._free_at = now() + seconds / SHARE


class PacedRoute(APIRoute):
    """A route before whose body is parsed, and validated, other work has a turn."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]  # FastAPI's returns a coroutine
        """See FastAPI."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Paced(request.scope, request.receive))

        return handle


class _Paced(Request):
    async def json(self) -> Any:
        """Return the parsed body; pydantic's parser takes half the time and knows less."""
        body = await self.body()
        await asyncio.sleep(0)
        with suppress(ValueError):
            parsed = from_json(body)
            await asyncio.sleep(0)
            return parsed
        return json.loads(body)
