"""CUDA graphs: GPU work that is captured once and replayed, so the host launches nothing."""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch

from exl2flow.core.runtime.collection import uncollected

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # of a recorded step
BEYOND = 32  # in multiples of which there are more
WARM_UP = 2  # runs before a recording, to compile kernels and create plans and workspaces

T = TypeVar("T")
_HOME: ContextVar[int | None] = ContextVar("home", default=None)


def replaying_stream() -> int | None:
    """Return the handle of the stream that replays what is being captured; None: not known."""
    return _HOME.get()


@contextmanager
def _captured_for(stream: int) -> Iterator[None]:
    token = _HOME.set(stream)
    try:
        yield
    finally:
        _HOME.reset(token)


class CudaGraph(Generic[T]):
    """A captured CUDA graph; `result` is overwritten by every replay, also by one of its pool.

    A launch that the driver refuses (`LaunchRefused`) is refused in the warm-up, which launches
    what the capture does, on the same device. What runs instead is remembered with the plans, so
    the capture does not try again. A refusal that comes only during the capture ends it, because
    the tables of other plans cannot be copied to the device then; `GraphPool` launches the step.
    """

    def __init__(self, work: Callable[[], T], beside: "CudaGraph[T] | None" = None) -> None:
        """Record work, in the memory of `beside` if the two never run at the same time.

        Raises:
            RuntimeError: part of it waits for the device, or memory runs out.
        """
        for _ in range(WARM_UP):
            work()
        self._graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside._graph.pool()
        home = torch.cuda.current_stream().cuda_stream
        here = torch.cuda.stream(torch.cuda.current_stream())  # torch leaves it when it fails
        with (
            uncollected(),  # else Python may free unreachable graphs, which ends a capture
            here,
            _captured_for(home),
            torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"),
        ):
            self.result = work()

    def replay(self) -> T:
        """Replay the work."""
        self._graph.replay()
        return self.result


class GraphPool:
    """CUDA graphs by key, in one pool of memory; work that cannot be captured is launched."""

    def __init__(
        self,
        idle: Callable[[], AbstractContextManager[None]],
        *,
        records: bool,
        device: torch.device,
    ) -> None:
        """`idle` makes a context in which work may run without changing any sequence."""
        self.records = records
        self._idle, self._device = idle, device
        self._graphs: dict[tuple[Hashable, ...], CudaGraph[Any]] = {}

    def replay(self, key: tuple[Hashable, ...], work: Callable[[], T]) -> T:
        """Replay the recording of a key, made from `work` on first use; or do the work."""
        self.make(key, work)
        return self._graphs[key].replay() if self.records else work()

    def make(self, key: tuple[Hashable, ...], work: Callable[[], T]) -> None:
        """Record work unless its key has a recording."""
        if not self.records or key in self._graphs:
            return
        beside = next(iter(self._graphs.values()), None)
        is_cuda = self._device.type == "cuda"
        here = torch.cuda.device(self._device) if is_cuda else nullcontext()  # owns the stream
        try:
            with here, self._idle():
                self._graphs[key] = CudaGraph(work, beside=beside)
        except RuntimeError as error:
            log.info("step=launched reason=%s", error)
            self.records = False

    def forget(self, mark: object) -> None:
        """Drop the recordings whose keys hold a mark."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if mark not in key}


def bucket(slots: int) -> int:
    """Return the rows of the smallest recording for this many slots."""
    if slots > ROWS[-1]:
        return -(-slots // BEYOND) * BEYOND
    return next(rows for rows in ROWS if rows >= slots)
