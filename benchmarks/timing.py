"""Time recorded work on a GPU."""

from collections.abc import Callable
from statistics import median

import torch


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of a CUDA graph of the work."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def copy_rate() -> float:
    """Return the GB/s at which a simple operation reads and writes memory."""
    numbers = torch.zeros(1 << 28, dtype=torch.int32, device="cuda")
    return 8e-6 * numbers.numel() / milliseconds(lambda: numbers.add_(1))
