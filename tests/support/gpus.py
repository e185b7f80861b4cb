"""Named stand-ins for GPUs whose launches are captured: devices, streams and graphs, no memory.

As in CUDA, each thread has a current device, and a current stream per device. A launch goes to the
current stream of its device; if that one captures, the launch is part of the graph. `torch.cuda`'s
own `graph` runs over them, and warns about an empty graph as torch does.
"""

import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from exl2flow.core.runtime import background
from exl2flow.kernels.cuda import graphs


class Stream:
    """A stream of a device; `graph` is what it captures, None if it runs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graph: Graph | None = None


class Graph:
    """A graph; `nodes`: devices of the launches in it; `replays`: how often it ran."""

    def __init__(self, gpus: "Gpus") -> None:
        self._gpus = gpus
        self.nodes, self.replays, self.shared = list[torch.device](), 0, list[object]()
        gpus.graphs.append(self)

    def pool(self) -> object:
        return self

    def capture_begin(self, *pool: object, **how: object) -> None:
        self.stream, self.thread = self._gpus.current_stream(), threading.get_ident()
        self.shared = [*pool]
        if any(graph.is_capturing for graph in self._gpus.graphs):
            raise RuntimeError("another capture is under way")
        self.stream.graph = self

    @property
    def is_capturing(self) -> bool:
        return hasattr(self, "stream") and self.stream.graph is self

    def capture_end(self) -> None:
        self.stream.graph = None
        if not self.nodes:
            warnings.warn(f"{graphs.EMPTY}. This usually means …", stacklevel=1)

    def replay(self) -> None:
        self.replays += 1


class Gpus:
    """GPUs of one host. runs: devices of the launches that ran instead of being captured."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._defaults: dict[torch.device, Stream] = {}
        self.graphs, self.runs = list[Graph](), list[torch.device]()

    def launch(self, index: int) -> None:
        """Launch something on a device, on its current stream."""
        stream = self.current_stream(torch.device("cuda", index))
        seen = self.runs if stream.graph is None else stream.graph.nodes
        seen.append(stream.device)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        place = device or self._device
        default = self._defaults.setdefault(place, Stream(place))
        return self._streams.get(place) or default

    @contextmanager
    def device(self, device: torch.device | str) -> Iterator[None]:
        before, self._own.device = self._device, torch.device(device)
        try:
            yield
        finally:
            self._own.device = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one of its device, and the device the current one."""
        with self.device(stream.device):
            before, self._streams[stream.device] = self.current_stream(), stream
            try:
                yield
            finally:
                self._streams[stream.device] = before

    @property
    def _device(self) -> torch.device:
        return getattr(self._own, "device", torch.device("cuda", 0))

    @property
    def _streams(self) -> dict[torch.device, Stream]:
        return self._own.__dict__.setdefault("streams", {})


@contextmanager
def stand_in() -> Iterator[Gpus]:
    """Let `torch.cuda` be GPUs that only note what they are given."""
    gpus, streams = Gpus(), defaultdict[object, Stream]()

    def own_stream(device: torch.device, purpose: object) -> Stream:
        return streams.setdefault((device, purpose), Stream(device))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("stream", "device", "current_stream"):
            patch.setattr(torch.cuda, name, getattr(gpus, name))
        patch.setattr(torch.cuda, "Stream", lambda: Stream(gpus._device))
        patch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(gpus))
        patch.setattr(torch.cuda.graph, "default_capture_stream", None)
        for name in ("synchronize", "empty_cache"):
            patch.setattr(torch.cuda, name, lambda *_: None)
        patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        for module in (background, graphs):
            patch.setattr(module, "own_stream", own_stream)
        yield gpus
