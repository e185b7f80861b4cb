"""Turns at a shared resource, fair between clients."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Admits some clients at a time; belongs to one event loop.

    Clients that wait take turns: one with many requests delays another's by one of them at most.
    """

    def __init__(self, places: int) -> None:
        """Admit `places` at once."""
        self._free, self._waiting = places, OrderedDict[str, deque[asyncio.Future[None]]]()

    @asynccontextmanager
    async def of(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn, which ends with the block."""
        if self._free:
            self._free -= 1
        else:
            await self._come(client)
        try:
            yield
        finally:
            self._next()

    async def _come(self, client: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came at the same moment
                self._next()
            raise

    def _next(self) -> None:
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # behind the other clients
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
