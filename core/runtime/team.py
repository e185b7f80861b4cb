"""A team: processes with a device each that do what this one, rank 0, tells them.

Commands go to each follower over a pipe. A thread watches the followers: if one ends, fails or
falls silent, all end, and so does what this process waits for.
"""

import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from os import getpid
from pathlib import Path
from queue import SimpleQueue
from socket import socketpair
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar
from weakref import finalize

import torch

from exl2flow.core import errors
from exl2flow.core.errors import Exl2FlowError, InferenceError, OutOfDeviceMemory
from exl2flow.core.options.environment import with_path

BEAT = 1.0  # seconds between two signs of life of a follower
SILENCE = 8.0  # seconds without one, after which it is lost
START_SECONDS = 120.0  # the same until it has its device
GRACE = 2.0  # seconds in which the loss of a rank is seen after an error, and all leave

Answer = tuple[bool, Any]  # whether it went well; a result, or what `failure_of` returned
Hear = Callable[[int, str, Any], None]  # rank, kind, content


class Meeting(Protocol):
    """What ranks exchange tensors through, once they have met."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None:
        """Leave the others."""

    def abort(self) -> None:
        """Let what waits for others that are lost end; any thread may call this."""


Met = TypeVar("Met", bound=Meeting)


class Team(ABC, Generic[Met]):
    """The followers of this process; they end with it, or when nothing refers to the team.

    program: module that followers run; again: what a person does after a loss; remedy: what one
    does when memory runs out; devices: of the ranks.
    """

    program: ClassVar[str]
    again: ClassVar[str]
    remedy: ClassVar[str]

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Start a process for each device but the first."""
        self.devices = tuple(devices)
        self._lock, self._dropped = threading.RLock(), deque[int]()
        self._watch = _Watch(self.program, len(self.devices), self.again)
        self._watch.start()
        self.close = finalize(self, self._watch.close)

    @property
    def followers(self) -> list[int]:
        """The ids of the followers' processes."""
        return [peer.process.pid for peer in self._watch.peers]

    @abstractmethod
    def meet(self, method: str) -> Met:
        """Meet the followers, which have been told to; see `torch.distributed`'s init methods."""

    def use(self) -> Callable[[], list[Any]]:
        """Let each follower take its device; what is returned waits until all have.

        Raises:
            Exl2FlowError: a follower is lost; by what is returned: one cannot use its device.
        """
        return self.begin("use", [str(device) for device in self.devices])

    def join(self) -> Met:
        """Meet the followers, which have their devices.

        Raises:
            Exl2FlowError: one of them is lost.
        """
        met = SimpleQueue[Met | Exl2FlowError]()

        def meet(method: str) -> None:
            try:
                met.put(self.meet(method))
            except Exl2FlowError as error:
                met.put(error)

        with tempfile.TemporaryDirectory(prefix="exl2flow-") as folder:
            method = (Path(folder) / "meeting").as_uri()
            self.tell(0, "join", (method, len(self.devices)), {}, wants_answer=False)
            # in a thread, as nothing ends the wait for a follower that is lost meanwhile
            threading.Thread(target=meet, args=(method,), daemon=True).start()
            while met.empty():
                self.check()
                time.sleep(0.01)
            ranks = met.get()
            if isinstance(ranks, Exl2FlowError):
                raise self.lost(ranks)
        self._watch.ranks = ranks
        return ranks

    def begin(self, name: str, *args: Any) -> Callable[[], list[Any]]:
        """Let followers do something; what is returned waits for their results, by rank.

        Raises:
            Exl2FlowError: a follower is lost; by what is returned: one of them cannot do it.
        """
        self.tell(0, name, args, {}, wants_answer=True)

        def results() -> list[Any]:
            answers = [peer.answers.get() for peer in self._watch.peers]
            self.check()
            for is_good, answer in answers:
                if not is_good:
                    raise error_of(*answer)
            return [answer for _, answer in answers]

        return results

    def hear(self, hear: Hear) -> None:
        """Let a function receive what followers tell unasked; its errors end the team."""
        self._watch.hear = hear

    def drop(self, key: int) -> None:
        """Let followers forget an object before their next work; any thread may call this."""
        self._dropped.append(key)

    @property
    def failure(self) -> Exl2FlowError | None:
        """The error with which the team ended, another object each time: it will hold frames."""
        failure = self._watch.failure
        return None if failure is None else type(failure)(*failure.args)

    def check(self) -> None:
        """Raise the error with which the team ended."""
        if (failure := self.failure) is not None:
            raise failure

    def lost(self, error: Exception) -> Exl2FlowError:
        """End the team after an error in this process; return what caused it."""
        self._watch.failed.wait(0 if isinstance(error, torch.OutOfMemoryError) else GRACE)
        self._watch.fail(error_of(*failure_of(error, 0, self.devices[0], self.remedy)))
        failure = self.failure
        assert failure is not None
        return failure

    def tell(self, key: int, name: str, args: Any, kwargs: Any, *, wants_answer: bool) -> None:
        """Let followers call a method of the object with a key; 0: of their `Follower`."""
        with self._lock:
            self.check()
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            for peer in self._watch.peers:
                with suppress(OSError):  # it is lost, as the thread will see
                    peer.pipe.send((dropped, key, name, args, kwargs, wants_answer))


class _Peer(NamedTuple):
    """A follower's process, the pipe to it, and its answers."""

    rank: int
    process: subprocess.Popen[bytes]
    pipe: "connection.Connection[Any, Any]"
    answers: SimpleQueue[Answer]


class _Watch(threading.Thread):
    """Starts followers and reads what they tell, as long as they live.

    failure: with which they ended; ranks: of this process, once they have met.
    """

    def __init__(self, program: str, size: int, again: str) -> None:
        super().__init__(name="exl2flow-team", daemon=True)
        self._program, self._size, self._again = program, size, again
        self.peers, self._seen = list[_Peer](), dict[int, float]()
        self.failure: Exl2FlowError | None = None
        self.failed, self._are_there = threading.Event(), threading.Event()
        self.ranks: Meeting | None = None
        self.hear: Hear = lambda rank, kind, content: None
        self._lock, self._is_closed = threading.Lock(), False

    def start(self) -> None:
        """Start the thread, which starts the followers: they end with the thread that did."""
        super().start()
        self._are_there.wait()

    def run(self) -> None:
        """Read until one is lost, or all shall end."""
        try:
            self.peers = [_started(self._program, rank) for rank in range(1, self._size)]
        except OSError as error:
            self.fail(InferenceError(f"no process starts for another rank: {error}"))
        self._are_there.set()
        self._seen = {peer.rank: time.monotonic() + START_SECONDS for peer in self.peers}
        while not self._is_closed and self.failure is None:
            ready = connection.wait([peer.pipe for peer in self.peers], BEAT)
            for peer in self.peers:
                if peer.pipe in ready:
                    self._read(peer)
                elif time.monotonic() - self._seen[peer.rank] > SILENCE:
                    self._lose(peer, f"has been silent for {SILENCE:.0f} s")
        self._end()

    def fail(self, failure: Exl2FlowError) -> None:
        """End all followers, and what waits for them; the first failure stays."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
        self.failed.set()
        self._end()
        if self.ranks is not None:
            self.ranks.abort()
        for peer in self.peers:
            peer.answers.put((False, None))

    def close(self) -> None:
        """End all followers."""
        self._is_closed = True
        ranks, self.ranks = self.ranks, None
        if ranks is not None and self.failure is None:  # all leave at the same time
            for peer in self.peers:
                with suppress(OSError):
                    peer.pipe.send(([], 0, "leave", (), {}, False))
            leaving = threading.Thread(target=ranks.__exit__, daemon=True)
            leaving.start()
            leaving.join(GRACE)
        self._end()
        if threading.current_thread() is not self:  # which may collect garbage
            self.join(GRACE)

    def _end(self) -> None:
        for peer in self.peers:
            peer.process.kill()
        for peer in self.peers:
            peer.process.wait()

    def _read(self, peer: _Peer) -> None:
        """Take what a follower tells: that it lives, an answer, its failure, or anything else."""
        try:
            kind, content = peer.pipe.recv()
        except (EOFError, OSError):
            if not self._is_closed:
                peer.process.kill()
                self._lose(peer, f"ended with status {peer.process.wait()}")
            return
        self._seen[peer.rank] = time.monotonic()
        if kind == "failure":
            self.fail(error_of(*content))
        elif kind == "answer":
            peer.answers.put(content)
        elif kind != "alive":
            try:
                self.hear(peer.rank, kind, content)
            except Exception as error:
                self.fail(error_of(*failure_of(error, 0, torch.device("cpu"), self._again)))

    def _lose(self, peer: _Peer, how: str) -> None:
        self.fail(InferenceError(f"rank {peer.rank} of {self._size} {how}; {self._again}"))


def _started(program: str, rank: int) -> _Peer:
    """Start a follower."""
    here, there = socketpair()
    with there:
        command = [sys.executable, "-m", program, str(rank), str(there.fileno()), str(getpid())]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            env=with_path(sys.path),
        )
    return _Peer(rank, process, connection.Connection(here.detach()), SimpleQueue())


def failure_of(
    error: BaseException, rank: int, device: torch.device, remedy: str
) -> tuple[str, str]:
    """Return the name and the text of a rank's error, which another process can raise.

    Args:
        error: of the rank.
        rank: its number.
        device: on which it computes.
        remedy: what a person does when its memory runs out.
    """
    if isinstance(error, torch.OutOfMemoryError):
        why = f"no memory is left on `{device}` for rank {rank}; {remedy}"
        return OutOfDeviceMemory.__name__, why
    if isinstance(error, Exl2FlowError):
        return type(error).__name__, str(error)
    return InferenceError.__name__, f"rank {rank} failed with `{type(error).__name__}`: {error}"


def error_of(name: str, text: str) -> Exl2FlowError:
    """Return the error that `failure_of` has described."""
    kind = getattr(errors, name, InferenceError)
    return kind(text) if issubclass(kind, Exl2FlowError) else InferenceError(text)
