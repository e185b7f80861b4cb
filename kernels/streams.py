"""Work of a device beside other work of it."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import copy_context
from functools import cache, wraps
from typing import ParamSpec, Self, TypeVar

import torch

from exl2flow.core.background import own_stream

T = TypeVar("T")
P = ParamSpec("P")
log = logging.getLogger(__name__)


def at_the_same_time(works: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """Return what independent pieces of work return; a GPU does them beside each other.

    Each has a thread, which prepares its launches, and a stream of its own. None of them may change
    what it or another one reads: where memory does not suffice, all are done again in turn.
    """
    if device.type == "cpu" or len(works) == 1:
        return [work() for work in works]
    _load_linear_algebra(device)
    current, inference = torch.cuda.current_stream(device), torch.is_inference_mode_enabled()

    def run(work: Callable[[], T], number: int) -> T:
        with torch.inference_mode(inference), torch.cuda.stream(own_stream(device, number)):
            return work()

    streams = [own_stream(device, number) for number in range(len(works))]
    for stream in streams:
        stream.wait_stream(current)
    with ThreadPoolExecutor(len(works), thread_name_prefix="exl2flow-stream") as pool:
        begun = [
            pool.submit(copy_context().run, run, work, number) for number, work in enumerate(works)
        ]
    for stream in streams:
        current.wait_stream(stream)
    with suppress(torch.OutOfMemoryError):
        return [item.result() for item in begun]
    del begun  # with the errors, which hold what their threads had
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    log.warning("remedy=out of memory: what was done side by side is done in turn")
    return [work() for work in works]


class Threads:
    """Threads that begin works in the order in which they come; a context manager.

    What they launch goes to the stream that was current where they were made, so that it is in
    order with the caller's own. Leaving the block waits for what has begun and drops the rest.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="exl2flow-thread")
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._inference = torch.is_inference_mode_enabled()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Do some work when a thread is free."""
        return self._pool.submit(copy_context().run, self._do, work)

    def _do(self, work: Callable[[], T]) -> T:
        stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        with torch.inference_mode(self._inference), stream:
            return work()


def used_here(*tensors: torch.Tensor) -> None:
    """Tell torch that the current stream uses tensors which another one made.

    For those that are freed before the other stream has waited for this one.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def kept(function: Callable[P, T]) -> Callable[P, T]:
    """Keep what a function sends to a device, made once even if two threads ask for it.

    Streams do not wait for each other: memory of a second one, freed by whoever asked, would be
    written again while a kernel that has not begun still needs it. Nothing is ever freed.
    """
    lock, made = threading.Lock(), dict[object, T]()

    @wraps(function)
    def ask(*args: P.args, **kwargs: P.kwargs) -> T:
        key = args, tuple(kwargs.items())
        with lock, torch.inference_mode(False):  # gradients, too, may use it
            if key not in made:
                made[key] = function(*args, **kwargs)
            return made[key]

    return ask


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a small tensor on a device, there for every stream, without waiting for other work.

    For functions that are `kept` only.
    """
    if device.type == "cpu":
        return tensor
    stream = own_stream(device, -1)
    with torch.cuda.stream(stream):
        there = tensor.pin_memory().to(device, non_blocking=True)
    stream.synchronize()
    return there


@cache
def _load_linear_algebra(device: torch.device) -> None:
    """Have torch load its library, which fails if two threads are the first to need it."""
    torch.linalg.cholesky_ex(torch.eye(1, device=device))
