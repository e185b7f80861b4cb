"""Overlap I/O with compute: copies off a device, background writes, read-ahead."""

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache, lru_cache
from types import TracebackType
from typing import Self, TypeVar

import torch

T = TypeVar("T")
Item = TypeVar("Item")
log = logging.getLogger(__name__)

HELPERS = 8
MOST_WAITING = 2  # results queued for writing; each holds its memory


class Background:
    """Run work in order in a background thread; a context manager.

    Leaving the block waits for all work. An exception is raised again in the caller, and the rest
    of the queue is dropped. If the model itself runs on the CPU, work runs immediately.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="exl2flow-store")
        self._at_once = device.type == "cpu"
        self._waiting: deque[Future[None]] = deque()
        self._failed = False
        self._seconds = 0.0  # the caller spent waiting for room

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
            log.info("waited %.1fs for results to be written", self._seconds)

    def submit(self, work: Callable[[], None]) -> None:
        """Queue `work`; block while `MOST_WAITING` items are pending."""
        if self._at_once:
            work()
            return
        self._make_room()
        self._waiting.append(self._pool.submit(copy_context().run, self._do, work))

    def store(self, write: Callable[[], T], commit: Callable[[T], None]) -> None:
        """Pass the result of `write` to `commit`; writes run in parallel, commits in order."""
        if self._at_once:
            commit(write())
            return
        self._make_room()
        written = helpers().submit(copy_context().run, write)
        self.submit(lambda: commit(written.result()))

    def is_idle(self) -> bool:
        """Return whether all work is done."""
        return all(work.done() for work in self._waiting)

    def _make_room(self) -> None:
        started = time.monotonic()
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= MOST_WAITING):
            self._waiting.popleft().result()
        self._seconds += time.monotonic() - started

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
    """Return the shared threads that read ahead, write, decode and hash."""
    return ThreadPoolExecutor(HELPERS, thread_name_prefix="exl2flow-helper")


def prefetch(works: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield the result of each function; the next one runs while a result is being used."""
    return look_ahead(works, lambda work: helpers().submit(work).result, depth=1)


def look_ahead(
    items: Iterable[Item], begin: Callable[[Item], Callable[[], T]], *, depth: int
) -> Iterator[T]:
    """Yield the result for each item; those of the next `depth` items are begun before.

    Args:
        items: say what to do, in order.
        begin: starts on an item in the background, and returns a function that waits for the end.
        depth: how many items are begun while a result is in use.
    """
    pending = deque[Callable[[], T]]()
    for item in items:
        pending.append(begin(item))
        if len(pending) > depth:
            yield pending.popleft()()
    while pending:
        yield pending.popleft()()


HostTensors = Callable[[], dict[str, torch.Tensor]]


def to_host(tensors: Mapping[str, torch.Tensor], *, hold: bool = False) -> HostTensors:
    """Start copying tensors to main memory while the device keeps working.

    Args:
        tensors: by name; those already in main memory are returned as they are.
        hold: make later work on the device wait, because it changes the tensors.

    Returns:
        A function that waits for the copies and returns them; any thread may call it.
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
    sources = list(tensors.values())  # until they are copied

    def wait() -> dict[str, torch.Tensor]:
        done.synchronize()
        sources.clear()
        return copies

    return wait


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory; the copy may still be in progress."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def send_async(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor from main memory to a device; to a GPU without waiting."""
    if torch.device(device).type == "cpu":
        return tensor
    source = tensor if tensor.is_pinned() else pinned(tensor)
    return source.to(device, non_blocking=True)


@contextmanager
def passing(device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Collect tensors that the block makes, for the current stream; others replace them soon.

    On a GPU they use memory of their own: freed, they leave no holes between tensors that stay.
    """
    found = dict[str, torch.Tensor]()
    if device.type != "cuda":
        yield found
        return
    current, stream = torch.cuda.current_stream(device), own_stream(device, "passing")
    with torch.cuda.stream(stream):
        yield found
    current.wait_stream(stream)
    for tensor in found.values():
        if tensor.is_cuda:
            tensor.record_stream(current)


@lru_cache(maxsize=128)
def own_stream(device: torch.device, purpose: Hashable) -> torch.cuda.Stream:
    """Return the CUDA stream that a device reserves for a purpose."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
