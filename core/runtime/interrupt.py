"""A first SIGINT or SIGTERM asks the stage to commit and stop, a second one exits at once.

A stage stops after the sublayer it is working on, or inside of it if that takes too long.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from exl2flow.core.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_SECONDS = 3.0  # for the current sublayer to be finished and committed


class StopRequest:
    """Set by the first signal; long loops check `signum` after each commit."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.deadline = math.inf  # in monotonic seconds

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal: remember the first, exit on the second."""
        if self.signum is not None:
            os._exit(128 + signum)
        self.signum = signum
        self.deadline = time.monotonic() + GRACE_SECONDS
        os.write(2, b"\nstopping after the current sublayer; repeat the signal to stop at once\n")


_listener: StopRequest | None = None  # of the outermost block in the main thread


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Catch the signals while the block runs.

    Nested blocks share its request, also in other threads. A thread without an outer block gets a
    request that stays unset, because only the main thread can catch signals.
    """
    global _listener
    if _listener is not None or threading.current_thread() is not threading.main_thread():
        yield _listener or StopRequest()
        return
    _listener = request = StopRequest()
    previous = {number: signal.signal(number, request) for number in SIGNALS}
    try:
        yield request
    finally:
        _listener = None
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Handle a SIGINT that comes during the block when it has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = list[tuple[int, FrameType | None]]()
    before = signal.signal(signal.SIGINT, lambda *signal_and_frame: came.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])


def look() -> None:
    """Leave work in progress once a signal has waited for it longer than the grace period.

    Call it in loops inside a sublayer, as often as every few tenths of a second, where nothing that
    is committed can be lost. Any thread may call it.

    Raises:
        Interrupted: a signal came, and the grace period is over.
    """
    request = _listener
    if request and request.signum is not None and time.monotonic() >= request.deadline:
        raise Interrupted(
            "stopped before the current sublayer was finished; everything finished is saved",
            signum=request.signum,
        )
