"""How long work takes on a GPU whose L2 cache has nothing of it, as between layers of a model."""

from collections.abc import Callable

import torch

PASSES = 16  # over other memory, before the work: the host has launched it when they are done
OF_CACHE = 2  # sizes of the cache that a pass reads


class ColdTimer:
    """Times work on the current device and its current stream, for which it waits."""

    def __init__(self, device: torch.device) -> None:
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.zeros(OF_CACHE * size // 4, device=device)

    def __call__(self, work: Callable[[], object]) -> float:
        """Return the milliseconds of one piece of work."""
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # of torch
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # of torch
        for _ in range(PASSES):
            self._other.sum()  # reads only: nothing is left to be written during the work
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))
