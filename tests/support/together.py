"""Ranks that are threads of this process, each with a real group of `torch.distributed`."""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from exl2flow.core.runtime.ranks import WorkRanks

T = TypeVar("T")


def on_all(count: int, work: Callable[[WorkRanks], T]) -> list[T]:
    """Return the results of all ranks, in their order."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as pool:
        meeting = (Path(folder) / "meeting").as_uri()

        def run(rank: int) -> T:
            with WorkRanks.join(meeting, rank, count, ["cpu"] * count) as ranks:
                return work(ranks)

        return [done.result() for done in [pool.submit(run, rank) for rank in range(count)]]
