"""Time work on a GPU whose L2 cache holds none of its data, as between a model's layers."""

from collections.abc import Callable

import torch

PASSES = 16  # reads of other memory before the work: the host has launched it by their end
OF_CACHE = 2  # a pass reads this many times the cache size


class ColdTimer:
    """Times work on the current device and stream, and waits for it."""

    def __init__(self, device: torch.device) -> None:
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.zeros(OF_CACHE * size // 4, device=device)

    def __call__(self, work: Callable[[], object]) -> float:
        """Return the milliseconds that `work` takes."""
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        for _ in range(PASSES):
            self._other.sum()  # reads only, so no write-back remains during the work
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))
