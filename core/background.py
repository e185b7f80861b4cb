"""Reading and storing beside computing: copies off a device, threads that write and read ahead."""

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import cache, lru_cache
from types import TracebackType
from typing import Self, TypeVar

import torch

T = TypeVar("T")
log = logging.getLogger(__name__)

HELPERS = 8
MOST_WAITING = 2  # results that wait to be written, each with its memory


class Background:
    """Does work in order in a thread of its own while the caller goes on; a context manager.

    Leaving the block waits for all work. What work raises is raised in the caller, and no other
    work is done after it. Where the CPU computes, too, it does the work at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="exl2flow-store")
        self._at_once = device.type == "cpu"
        self._waiting: deque[Future[None]] = deque()
        self._failed = False
        self._seconds = 0.0  # that the caller waited for room

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        finally:
            self._pool.shutdown()
        if self._seconds > 1:
            log.info("waited %.1fs for what was being stored", self._seconds)

    def submit(self, work: Callable[[], None]) -> None:
        """Do `work` after what was submitted before; waits while `MOST_WAITING` pieces wait."""
        if self._at_once:
            work()
            return
        self._make_room()
        self._waiting.append(self._pool.submit(copy_context().run, self._do, work))

    def store(self, write: Callable[[], T], commit: Callable[[T], None]) -> None:
        """Give `commit` what `write` returns: several write at the same time, each is in order."""
        if self._at_once:
            commit(write())
            return
        self._make_room()
        written = helpers().submit(copy_context().run, write)
        self.submit(lambda: commit(written.result()))

    def is_idle(self) -> bool:
        """Tell whether all work is done."""
        return all(work.done() for work in self._waiting)

    def _make_room(self) -> None:
        begun = time.monotonic()
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= MOST_WAITING):
            self._waiting.popleft().result()
        self._seconds += time.monotonic() - begun

    def wait(self) -> None:
        """Wait for all work."""
        while self._waiting:
            self._waiting.popleft().result()

    def _do(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except BaseException:
            self._failed = True
            raise


@cache
def helpers() -> ThreadPoolExecutor:
    """Return threads that read files ahead of their use, and write, decode and hash."""
    return ThreadPoolExecutor(HELPERS, thread_name_prefix="exl2flow-helper")


def one_ahead(works: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield what works return; each is begun while the one before is used."""
    ahead: Future[T] | None = None
    for work in works:
        begun = helpers().submit(work)
        if ahead is not None:
            yield ahead.result()
        ahead = begun
    if ahead is not None:
        yield ahead.result()


HostTensors = Callable[[], dict[str, torch.Tensor]]


def to_host(tensors: Mapping[str, torch.Tensor], *, hold: bool = False) -> HostTensors:
    """Begin to copy tensors to main memory beside the device's own work.

    Args:
        tensors: by name; those in main memory are passed on as they are.
        hold: the device's later work waits for the copies, for it changes the tensors.

    Returns:
        What waits for the copies and returns them; any thread may call it.
    """
    device = next((t.device for t in tensors.values() if t.is_cuda), None)
    if device is None:
        return lambda: dict(tensors)
    current, stream = torch.cuda.current_stream(device), own_stream(device, "copies")
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        copies = {name: pinned(t) if t.is_cuda else t for name, t in tensors.items()}
        done = stream.record_event()
    if hold:
        current.wait_event(done)
    kept = list(tensors.values())  # until they are copied

    def wait() -> dict[str, torch.Tensor]:
        done.synchronize()
        kept.clear()
        return copies

    return wait


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, to which it may be on its way."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def on_its_way(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor of main memory on a device; to a GPU it is sent without waiting for it."""
    if torch.device(device).type == "cpu":
        return tensor
    source = tensor if tensor.is_pinned() else pinned(tensor)
    return source.to(device, non_blocking=True)


@lru_cache(maxsize=128)
def own_stream(device: torch.device, purpose: Hashable) -> torch.cuda.Stream:
    """Return the stream of a device that is kept for a purpose."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
