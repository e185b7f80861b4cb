"""Whose texts come next: a queue in front of the generator, fair between keys."""

import asyncio
import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from exl2flow.serve.errors import ApiError
from exl2flow.serve.hosts.keys import Key

AHEAD = 8  # texts that the generator has beside those in its slots
ENDS = 32  # the last ones say how fast the queue is
LONGEST_ADVICE = 60  # seconds


@dataclass(eq=False, slots=True)
class Admission:
    """The texts of one request, which run or wait."""

    key: Key
    texts: int
    has_come: asyncio.Future[None] = field(default_factory=lambda: asyncio.Future())


class FairQueue:
    """Lets the texts of requests run, `room` of them at once.

    Next is the key with the fewest running texts among those below their own limit, and its oldest
    request. One that has more texts than there is room runs alone, as does one above its key's
    limit among the texts of that key; nobody goes before it meanwhile, so it does not starve.
    """

    def __init__(self, room: int) -> None:
        self.room, self.running, self.waiting = room, Counter[str](), list[Admission]()
        self._ends = deque[float](maxlen=ENDS)

    async def enter(self, key: Key, texts: int, *, seconds: float) -> Admission:
        """Wait until texts may run; `leave` ends that.

        Raises:
            ApiError: too many of the key's requests wait (429), or this one did for too long (503).
        """
        turn = Admission(key, texts)
        self.waiting.append(turn)
        self._advance()
        others = sum(one.key.name == key.name for one in self.waiting) - 1
        try:
            if not turn.has_come.done() and key.waiting is not None and others >= key.waiting:
                why = f"{others} requests of {key.name!r} wait; try again later"
                raise ApiError(429, why, retry_after=self.advice)
            async with asyncio.timeout(seconds):
                await turn.has_come
        except BaseException as error:
            self.leave(turn)
            if isinstance(error, TimeoutError):
                why = f"no turn in {seconds:.0f} s; try again later"
                raise ApiError(503, why, retry_after=self.advice) from None
            raise
        return turn

    def leave(self, turn: Admission) -> None:
        """End a turn, or the waiting for it."""
        if turn in self.waiting:
            self.waiting.remove(turn)
        else:
            self.running[turn.key.name] -= turn.texts
            self._ends.append(time.monotonic())
        self._advance()

    @property
    def advice(self) -> int:
        """Seconds after which a refused request may try again."""
        if len(self._ends) < 2:
            return 1
        pace = (time.monotonic() - self._ends[0]) / len(self._ends)
        return min(max(1, math.ceil(pace * len(self.waiting))), LONGEST_ADVICE)

    def _advance(self) -> None:
        while (turn := self._next()) is not None:
            used = self.running.total()
            if used and used + turn.texts > self.room:
                return
            self.waiting.remove(turn)
            self.running[turn.key.name] += turn.texts
            if not turn.has_come.done():  # else its client has left, and `leave` follows
                turn.has_come.set_result(None)

    def _next(self) -> Admission | None:
        def may_run(turn: Admission) -> bool:
            own, limit = self.running[turn.key.name], turn.key.running
            return not own or limit is None or own + turn.texts <= limit

        able = [turn for turn in self.waiting if may_run(turn)]
        return min(able, key=lambda turn: self.running[turn.key.name], default=None)
