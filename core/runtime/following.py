"""A follower's side of a team: the loop in which it does what rank 0 tells it."""

import ctypes
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch

from exl2flow.core.errors import Exl2FlowError
from exl2flow.core.runtime.team import BEAT, Meeting, failure_of

PR_SET_PDEATHSIG = 1  # Linux's prctl(2)


class Follower:
    """A follower's objects by their keys; its own is 0.

    channel: to rank 0, for what is told unasked; remedy: as of its `Team`.
    """

    channel: "Channel"
    remedy: ClassVar[str]

    def __init__(self, rank: int) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self.objects: dict[int, Any] = {0: self}
        self._met: Meeting | None = None

    def use(self, devices: Sequence[str]) -> None:
        """Take this rank's device."""
        self.device = torch.device(devices[self.rank])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)

    def leave(self) -> None:
        """Leave the others."""
        assert self._met is not None
        self._met.__exit__()


class Channel:
    """The socket to rank 0; a thread says that this process lives, and ends it with rank 0.

    beats: whether it says so; libraries may hold the thread up while they are set up.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock, self.beats = pipe, threading.Lock(), False
        threading.Thread(target=self._beat, name="exl2flow-beat", daemon=True).start()

    def receive(self) -> Any:
        """Return the next command; end with rank 0."""
        try:
            return self._pipe.recv()
        except EOFError:
            os._exit(0)

    def send(self, kind: str, content: Any = None) -> None:
        """Tell rank 0 something; any thread may call this."""
        with self._lock:
            self._pipe.send((kind, content))

    def _beat(self) -> None:
        watched = select.poll()
        watched.register(self._pipe, 0)  # whether the other end is closed
        while not watched.poll(1000 * BEAT):
            if self.beats:
                self.send("alive")
        os._exit(0)  # the main thread may wait for rank 0


def obey(follower: Follower, channel: Channel) -> None:
    """Obey until rank 0 ends; an error ends this process, and so all of them."""
    while True:
        dropped, key, name, args, kwargs, wants_answer = channel.receive()
        for old in dropped:
            follower.objects.pop(old, None)
        method: Callable[..., Any] = getattr(follower.objects[key], name)
        try:
            result = method(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exl2FlowError | torch.OutOfMemoryError):
                traceback.print_exc()
            told = failure_of(error, follower.rank, follower.device, follower.remedy)
            if not wants_answer:
                channel.send("failure", told)
                os._exit(1)  # without a word to the others, who wait for this rank
            channel.send("answer", (False, told))
        else:
            if wants_answer:
                channel.send("answer", (True, result))
                channel.beats = True


def main(kind: type[Follower], arguments: Sequence[str]) -> None:
    """Follow rank 0, whose team started this process: arguments are RANK FD PID."""
    rank, descriptor, parent = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to stop
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        return
    follower = kind(rank)
    follower.channel = Channel(Connection(descriptor))
    obey(follower, follower.channel)
