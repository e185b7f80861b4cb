"""GPU work that is recorded once and replayed, so that launching it costs the host nothing."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

WARM_UP = 2  # runs before a recording, to compile kernels and create plans and workspaces

T = TypeVar("T")


class Recording(Generic[T]):
    """Recorded work; `result` is overwritten by every replay, also by one of its pool."""

    def __init__(self, work: Callable[[], T], beside: "Recording[T] | None" = None) -> None:
        """Record work, in the memory of `beside` if the two never run at the same time.

        Raises:
            RuntimeError: part of it waits for the device, or memory runs out.
        """
        for _ in range(WARM_UP):
            work()
        self._graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside._graph.pool()
        here = torch.cuda.stream(torch.cuda.current_stream())  # torch leaves it when it fails
        with here, torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.result = work()

    def replay(self) -> T:
        """Replay the work."""
        self._graph.replay()
        return self.result
