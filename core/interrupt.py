"""The first SIGINT or SIGTERM makes the stage commit and stop, the second exits immediately."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Set by the first signal; long loops check `signum` after each commit."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal: remember the first, exit on the second."""
        if self.signum is not None:
            os._exit(128 + signum)
        self.signum = signum
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
