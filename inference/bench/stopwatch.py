"""The time of repeated work, and the rate at which a GPU copies."""

import math
import time
from collections.abc import Callable
from statistics import median

import torch

from exl2flow.core.runtime.memory import free_memory
from exl2flow.kernels import elapsed
from exl2flow.kernels.cuda.graphs import CudaGraph

COPIED = 1 << 28  # numbers of 32 bits, far more than the chip's cache holds


def seconds(
    work: Callable[[], object], repeats: int = 20, *, warm_up: int = 2, limit: float = math.inf
) -> float:
    """Return the median time of calls, including their work on the device.

    Args:
        work: what is called.
        repeats: calls that count, at most.
        warm_up: calls before them, in which kernels are compiled and recorded.
        limit: seconds after which no further call begins; one counts in any case.
    """
    for _ in range(warm_up):
        work()
    times: list[float] = []
    while not times or (len(times) < repeats and sum(times) < limit):
        _settle()
        start = time.perf_counter()
        work()
        _settle()
        times.append(time.perf_counter() - start)
    return median(times)


def _settle() -> None:
    """Wait for the device."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of a CUDA graph of the work."""
    graph = CudaGraph(work)
    return median(elapsed(graph.replay) for _ in range(repeats))


def copy_rate() -> float:
    """Return the GB/s at which a simple operation reads and writes the memory of a GPU."""
    count = min(COPIED, free_memory(torch.device("cuda")) // 8)
    numbers = torch.zeros(count, dtype=torch.int32, device="cuda")
    return 8e-6 * numbers.numel() / milliseconds(lambda: numbers.add_(1))
