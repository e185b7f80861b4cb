"""Ranks that are threads of this process, so that tests need no others."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar

import torch

from exl2flow.model.tensor_parallel.ranks import Ranks

T = TypeVar("T")
PATIENCE = 60  # seconds


class ThreadRanks(Ranks):
    """One of two threads, which exchange tensors at a barrier."""

    barrier = threading.Barrier(2)
    parts: ClassVar[dict[int, torch.Tensor]] = {}

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.parts[self.rank] = x
        self.barrier.wait(PATIENCE)
        parts = [self.parts[rank].clone() for rank in range(self.count)]
        self.barrier.wait(PATIENCE)
        return parts


def on_both(work: Callable[[ThreadRanks], T]) -> list[T]:
    """Return the results of two ranks; an error of one ends the other."""

    def run(rank: int) -> T:
        try:
            with torch.inference_mode():
                return work(ThreadRanks(rank, 2))
        except BaseException:
            ThreadRanks.barrier.abort()
            raise

    ThreadRanks.barrier.reset()
    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(2)]]
