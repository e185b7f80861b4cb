"""CUDA graphs: GPU work that is captured once and replayed, so the host launches nothing."""

import logging
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from exl2flow.core.runtime.background import own_stream
from exl2flow.core.runtime.collection import uncollected

log = logging.getLogger(__name__)

CAPTURING = threading.RLock()  # captures register with the random number generator
EMPTY = "The CUDA Graph is empty"  # how torch's warning begins

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # of a recorded step
BEYOND = 32  # in multiples of which there are more
WARM_UP = 2  # runs before a recording, to compile kernels and create plans and workspaces

T = TypeVar("T")


class EmptyRecording(RuntimeError):
    """Nothing was captured: the work went to another device or stream."""


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
            EmptyRecording: nothing of it was launched on the current device.
        """
        for _ in range(WARM_UP):
            work()
        self._graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside._graph.pool()
        self._stream: torch.cuda.Stream = capture_stream() if beside is None else beside._stream
        with _captures(self._graph, pool, self._stream):
            self.result = work()

    def replay(self) -> T:
        """Replay the work."""
        self._graph.replay()
        return self.result


class GraphPool:
    """CUDA graphs by key, in one pool of memory; work that cannot be captured is launched.

    recorded: how often something was to be recorded.
    """

    def __init__(
        self,
        idle: Callable[[], AbstractContextManager[None]],
        *,
        records: bool,
        device: torch.device,
    ) -> None:
        """`idle` makes a context in which work may run without changing any sequence."""
        self.records, self.recorded = records, 0
        self._idle, self._device = idle, device
        self._graphs: dict[tuple[Hashable, ...], CudaGraph[Any]] = {}
        self._launched = set[tuple[Hashable, ...]]()  # keys of what could not be recorded
        self._beside: CudaGraph[Any] | None = None  # whose memory the next recording shares

    def replay(self, key: tuple[Hashable, ...], work: Callable[[], T]) -> T:
        """Replay the recording of a key, made from `work` on first use; or do the work."""
        if (graph := self._graphs.get(key)) is None:
            self.make(key, work)
            graph = self._graphs.get(key)
        return work() if graph is None else graph.replay()

    def make(self, key: tuple[Hashable, ...], work: Callable[[], T]) -> None:
        """Record work unless its key has a recording, or could not be recorded before."""
        if self.is_launched(key) or key in self._graphs:
            return
        self.recorded += 1
        is_cuda = self._device.type == "cuda"
        here = torch.cuda.device(self._device) if is_cuda else nullcontext()  # owns the stream
        try:
            with here, self._idle():
                self._graphs[key] = graph = CudaGraph(work, beside=self._beside)
            self._beside = self._beside or graph
        except RuntimeError as error:
            self._launched.add(key)
            self._beside = None  # a failed capture may leave its memory unusable for others
            log.warning(
                "step %s on `%s` cannot be recorded and is launched, which is slower: %s",
                key,
                self._device,
                str(error).partition("\n")[0],
            )

    def is_launched(self, key: tuple[Hashable, ...]) -> bool:
        """Return whether the work of a key is never recorded."""
        return not self.records or key in self._launched

    def forget(self, mark: object) -> None:
        """Drop the recordings whose keys hold a mark, and record them again when they are used."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if mark not in key}
        if self._beside not in self._graphs.values():
            self._beside = next(iter(self._graphs.values()), None)
        self._launched = {key for key in self._launched if mark not in key}


def capture_stream() -> torch.cuda.Stream:
    """Return the stream on which this thread captures what it launches on the current device.

    Without one torch captures on the device that was current at the first capture in the process,
    where work for another device is not recorded.
    """
    device = torch.cuda.current_stream().device
    return own_stream(device, ("recordings", threading.get_ident()))


@contextmanager
def not_empty(device: torch.device) -> Iterator[None]:
    """Refuse an empty graph at the end of a capture, about which torch only warns.

    Raises:
        EmptyRecording: nothing was captured, so replays would do nothing.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=EMPTY)
        try:
            yield
        except UserWarning as warning:
            if not str(warning).startswith(EMPTY):
                raise
            raise EmptyRecording(f"nothing was launched on `{device}` during it") from warning


@contextmanager
def _captures(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture the block."""
    here = torch.cuda.stream(torch.cuda.current_stream())  # torch leaves it when it fails
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    # Python may otherwise free unreachable graphs, which ends a capture
    with CAPTURING, not_empty(stream.device), uncollected(), here, capture:
        yield


def bucket(slots: int) -> int:
    """Return the rows of the smallest recording for this many slots."""
    if slots > ROWS[-1]:
        return -(-slots // BEYOND) * BEYOND
    return next(rows for rows in ROWS if rows >= slots)
