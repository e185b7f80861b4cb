"""Threads and streams for work that runs concurrently on a device; copies that do not wait."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import ContextVar, copy_context
from functools import cache, wraps
from typing import ParamSpec, Self, TypeVar

import torch

from exl2flow.core.runtime.background import own_stream

T = TypeVar("T")
P = ParamSpec("P")
MOST_BUFFERED = 4 << 10  # bytes
runs_beside = ContextVar("runs_beside", default=False)  # whether other threads compute, too
log = logging.getLogger(__name__)


def run_concurrently(works: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """Run independent pieces of work, concurrently on a GPU; return their results.

    Each has its own thread, which prepares its launches, and its own stream. None may change what
    it or another one reads: if memory runs out, all are run again in turn.
    """
    if device.type == "cpu" or len(works) == 1:
        return [work() for work in works]
    _load_linear_algebra(device)
    current, inference = torch.cuda.current_stream(device), torch.is_inference_mode_enabled()

    def run(work: Callable[[], T], number: int) -> T:
        runs_beside.set(True)  # in a context of its own
        with torch.inference_mode(inference), torch.cuda.stream(own_stream(device, number)):
            return work()

    streams = [own_stream(device, number) for number in range(len(works))]
    for stream in streams:
        stream.wait_stream(current)
    with ThreadPoolExecutor(len(works), thread_name_prefix="exl2flow-stream") as pool:
        futures = [
            pool.submit(copy_context().run, run, work, number) for number, work in enumerate(works)
        ]
    for stream in streams:
        current.wait_stream(stream)
    with suppress(torch.OutOfMemoryError):
        return [future.result() for future in futures]
    del futures  # and the errors, which keep their threads' tensors alive
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    log.warning("remedy=out of memory: run again in turn what ran concurrently")
    return [work() for work in works]


def elapsed(work: Callable[[], object]) -> float:
    """Return the milliseconds of work on the current CUDA device; waits for it."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


class Threads:
    """Threads that start work in submission order; a context manager.

    Their launches go to the stream that was current when this was created, so they are in order
    with the caller's own. Leaving the block waits for started work and drops the rest.
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
        """Run `work` when a thread is free."""
        return self._pool.submit(copy_context().run, self._do, work)

    def _do(self, work: Callable[[], T]) -> T:
        stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        with torch.inference_mode(self._inference), stream:
            return work()


def record_stream(*tensors: torch.Tensor) -> None:
    """Record that the current stream uses tensors made on another one.

    For tensors that may be freed before the other stream waits for this one.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def device_cache(function: Callable[P, T]) -> Callable[P, T]:
    """Cache what a function sends to a device; done once even if two threads call it.

    Streams do not wait for each other: if a second copy were freed, its memory would be rewritten
    while a kernel that has not started still needs it. Nothing is ever freed.
    """
    lock, results = threading.Lock(), dict[object, T]()

    @wraps(function)
    def ask(*args: P.args, **kwargs: P.kwargs) -> T:
        key = args, tuple(kwargs.items())
        with lock, torch.inference_mode(False):  # autograd may use it too
            if key not in results:
                results[key] = function(*args, **kwargs)
            return results[key]

    return ask


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, without waiting for the device.

    CUDA copies a little pageable memory into a buffer of its own before it returns; for more it
    waits until the device has done all that was launched before.
    """
    if device.type == "cuda" and not tensor.is_cuda and tensor.nbytes > MOST_BUFFERED:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a small tensor on a device, ready for every stream, without waiting for other work.

    Only for functions decorated with `device_cache`.
    """
    if device.type == "cpu":
        return tensor
    stream = own_stream(device, -1)
    with torch.cuda.stream(stream):
        copy = tensor.pin_memory().to(device, non_blocking=True)
    stream.synchronize()
    return copy


@device_cache
def device_table(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return integers as int64 on a device; each table is sent once.

    The result is shared: never change it.
    """
    return sent(torch.tensor(values, dtype=torch.int64), device)


@cache
def _load_linear_algebra(device: torch.device) -> None:
    """Make torch load its library, which fails if two threads trigger it at once."""
    torch.linalg.cholesky_ex(torch.eye(1, device=device))
