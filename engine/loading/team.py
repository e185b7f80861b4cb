"""A team: processes with a GPU each that repeat what this one, rank 0, does with a shared model.

Commands go to each follower over a pipe, tensors through `Ranks`. A thread watches the followers:
if one ends, fails or falls silent, all end, and so does what this process waits for.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import wraps
from itertools import count
from multiprocessing import connection
from pathlib import Path
from queue import SimpleQueue
from socket import socketpair
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar
from weakref import finalize

import torch
from torch import distributed

from exl2flow.core import errors
from exl2flow.core.errors import (
    BackendUnavailable,
    ConfigError,
    Exl2FlowError,
    InferenceError,
    OutOfDeviceMemory,
)
from exl2flow.core.options.environment import with_path
from exl2flow.core.runtime.interrupt import uninterrupted
from exl2flow.kernels import resolve_device
from exl2flow.model.tensor_parallel.ranks import Ranks

PROGRAM = "exl2flow.engine.generate.follow"
BEAT = 1.0  # seconds between two signs of life of a follower
SILENCE = 8.0  # seconds without one, after which it is lost
START_SECONDS = 120.0  # the same until it has its device
GRACE = 2.0  # seconds in which the loss of a rank is seen after an error, and all leave

P = ParamSpec("P")
T = TypeVar("T")
Answer = tuple[bool, Any]  # whether it went well; a result, or what `failure_of` returned


def places(tensor_parallel: int | str | Sequence[int], device: str) -> list[torch.device]:
    """Return the device of each rank.

    Args:
        tensor_parallel: how many ranks, `all` GPUs, or the GPUs' indexes.
        device: auto, cpu or cuda; on CPUs ranks are given by number.

    Raises:
        BackendUnavailable: torch cannot use the device, or has no NCCL.
        ConfigError: it is none of these, names a device twice or one that is not there.
    """
    kind, seen = resolve_device(device), torch.cuda.device_count()
    if kind.type == "cuda" and not distributed.is_nccl_available():
        raise BackendUnavailable(
            "this build of torch has no NCCL, through which GPUs exchange their parts; install "
            "one that has, or split layers: `--gpu-split auto`"
        )
    if kind.type == "cpu":
        if not isinstance(tensor_parallel, int) or tensor_parallel < 1:
            raise ConfigError("on CPUs `tensor_parallel` is a number of processes")
        return [kind] * tensor_parallel
    if tensor_parallel == "all":
        tensor_parallel = seen
    if isinstance(tensor_parallel, str) or tensor_parallel == 0:
        raise ConfigError(f"`tensor_parallel` is {tensor_parallel!r}; give a number of GPUs or all")
    chosen = range(tensor_parallel) if isinstance(tensor_parallel, int) else tensor_parallel
    if len({*chosen}) < len(chosen):
        raise ConfigError(f"`tensor_parallel` names a GPU twice: {', '.join(map(str, chosen))}")
    if absent := [index for index in chosen if not 0 <= index < seen]:
        there = ", ".join(map(str, range(seen)))
        raise ConfigError(f"tensor parallel needs GPU {absent[0]}, but torch sees {there}")
    return [torch.device("cuda", index) for index in chosen]


class Counterpart(NamedTuple):
    """The followers' copy of an object: their team, and the key that it has there."""

    team: "Team"
    key: int


class Mirrored(Protocol):
    """An object whose `mirrored` methods followers run, too; None: nobody follows."""

    counterpart: Counterpart | None


S = TypeVar("S", bound=Mirrored)


def mirrored(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Let followers run a method with the same arguments, which can be pickled."""

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.counterpart is None or self.counterpart.team.is_leading:
            return method(self, *args, **kwargs)
        with self.counterpart.team.leading(self.counterpart.key, method.__name__, *args, **kwargs):
            return method(self, *args, **kwargs)

    return run


class Team:
    """The followers of this process; they end with it, or when nothing refers to the team.

    devices: of the ranks. is_leading: whether followers run what this process runs now.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Start a process for each device but the first."""
        self.devices, self.is_leading = tuple(devices), False
        self._lock, self._keys = threading.RLock(), count(1)
        self._dropped = deque[int]()
        self._watch = _Watch(len(self.devices))
        self._watch.start()
        self.close = finalize(self, self._watch.close)

    @property
    def followers(self) -> list[int]:
        """The ids of the followers' processes."""
        return [peer.process.pid for peer in self._watch.peers]

    def join(self) -> Ranks:
        """Meet the followers, each on its device.

        Raises:
            Exl2FlowError: one of them cannot use its device, or is lost.
        """
        self.begin("use", [str(device) for device in self.devices])()
        met = SimpleQueue[Ranks | Exl2FlowError]()

        def meet(method: str) -> None:
            try:
                met.put(self._joined(method))
            except Exl2FlowError as error:
                met.put(error)

        with tempfile.TemporaryDirectory(prefix="exl2flow-") as folder:
            method = (Path(folder) / "meeting").as_uri()
            self._tell(0, "join", (method, len(self.devices)), {}, False)
            # in a thread, as nothing ends the wait for a follower that is lost meanwhile
            threading.Thread(target=meet, args=(method,), daemon=True).start()
            while met.empty():
                self.check()
                time.sleep(0.01)
            ranks = met.get()
            if isinstance(ranks, Exl2FlowError):
                raise self.lost(ranks)
        self._watch.ranks = ranks  # without the guard, which refers to the team
        return replace(ranks, guard=self._check_leading)

    def _joined(self, method: str) -> Ranks:
        device = self.devices[0] if self.devices[0].type == "cuda" else None
        return Ranks.join(method, rank=0, count=len(self.devices), device=device, is_led=True)

    def begin(self, name: str, *args: Any) -> Callable[[], list[Any]]:
        """Let followers do something; what is returned waits for their results, by rank.

        Raises:
            Exl2FlowError: a follower is lost; by what is returned: one of them cannot do it.
        """
        self._tell(0, name, args, {}, True)

        def results() -> list[Any]:
            answers = [peer.answers.get() for peer in self._watch.peers]
            self.check()
            for is_good, answer in answers:
                if not is_good:
                    raise error_of(*answer)
            return [answer for _, answer in answers]

        return results

    def free(self) -> list[int]:
        """Return the free bytes of each follower's GPU; on CPUs there is nothing to ask."""
        return self.begin("free")() if self.devices[0].type == "cuda" else []

    def mirror(self, *args: Any) -> Counterpart:
        """Let followers make what `follow.Follower.make` makes, and return where it is."""
        key = next(self._keys)
        self.begin("make", key, *args)()
        return Counterpart(self, key)

    def drop(self, key: int) -> None:
        """Let followers forget an object before their next work; any thread may call this."""
        self._dropped.append(key)

    @contextmanager
    def leading(self, key: int, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Let followers run a method of an object while this process runs the block.

        Raises:
            Exl2FlowError: a follower is lost, or the block failed; then all of them end.
        """
        with uninterrupted():  # others do not know of an interrupt, and go on
            self._tell(key, name, args, kwargs, False)
            self.is_leading = True
            try:
                yield
            except Exception as error:
                raise self.lost(error) from error
            finally:
                self.is_leading = False

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
        self._watch.fail(error_of(*failure_of(error, 0, self.devices[0])))
        failure = self.failure
        assert failure is not None
        return failure

    def _check_leading(self) -> None:
        if not self.is_leading:
            raise ConfigError(
                "this needs a whole model, not one that ranks share: load it without "
                "`tensor_parallel`"
            )

    def _tell(self, key: int, name: str, args: Any, kwargs: Any, wants_answer: bool) -> None:
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

    def __init__(self, size: int) -> None:
        super().__init__(name="exl2flow-team", daemon=True)
        self.peers, self._size, self._seen = list[_Peer](), size, dict[int, float]()
        self.failure: Exl2FlowError | None = None
        self.failed, self._are_there = threading.Event(), threading.Event()
        self.ranks: Ranks | None = None
        self._lock, self._is_closed = threading.Lock(), False

    def start(self) -> None:
        """Start the thread, which starts the followers: they end with the thread that did."""
        super().start()
        self._are_there.wait()

    def run(self) -> None:
        """Read until one is lost, or all shall end."""
        try:
            self.peers = [_started(rank) for rank in range(1, self._size)]
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
        """Take what a follower tells: that it lives, an answer, or its failure."""
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

    def _lose(self, peer: _Peer, how: str) -> None:
        self.fail(InferenceError(f"rank {peer.rank} of {self._size} {how}; load the model again"))


def _started(rank: int) -> _Peer:
    """Start a follower."""
    here, there = socketpair()
    with there:
        command = [sys.executable, "-m", PROGRAM, str(rank), str(there.fileno()), str(os.getpid())]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            env=with_path(sys.path),
        )
    return _Peer(rank, process, connection.Connection(here.detach()), SimpleQueue())


def failure_of(error: BaseException, rank: int, device: torch.device) -> tuple[str, str]:
    """Return the name and the text of a rank's error, which another process can raise."""
    if isinstance(error, torch.OutOfMemoryError):
        why = f"no memory is left on `{device}` for rank {rank}; give fewer `tokens` or `slots`"
        return OutOfDeviceMemory.__name__, why
    if isinstance(error, Exl2FlowError):
        return type(error).__name__, str(error)
    return InferenceError.__name__, f"rank {rank} failed with `{type(error).__name__}`: {error}"


def error_of(name: str, text: str) -> Exl2FlowError:
    """Return the error that `failure_of` has described."""
    kind = getattr(errors, name, InferenceError)
    return kind(text) if issubclass(kind, Exl2FlowError) else InferenceError(text)
