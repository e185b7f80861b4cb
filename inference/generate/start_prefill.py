"""Prefill of a prompt from its start by CUDA graphs, because launches take longer than its work."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch

from exl2flow.core.runtime.memory import free_memory
from exl2flow.inference.cache.paged import PagedCache
from exl2flow.inference.cache.views import Segment, StartView
from exl2flow.kernels import FEW_ROWS, PAGE_TOKENS, on_device, slots_of
from exl2flow.kernels.cuda.graphs import GraphPool
from exl2flow.model import Decoder, RopeTables
from exl2flow.model.memory.footprint import PROMPT_TOKENS

LENGTHS = (128, 256, 384, 512, PROMPT_TOKENS)  # tokens of a recording
MOST_PADDED = 128  # tokens that are read for nothing
LAUNCHED = 2  # prompts of a length before it is recorded, which takes as long as three more
LEAST_FREE = 2 << 30  # bytes of a device with recordings: they hold the memory of their passes


class StartPrefill:
    """Reads up to `PROMPT_TOKENS` tokens of one sequence from its start.

    Padding behind them is written to the spare page.
    """

    def __init__(
        self, decoder: Decoder, cache: PagedCache, angles: RopeTables, graphs: GraphPool
    ) -> None:
        """Take the angles of all positions of a sequence, and recordings that hold nothing else."""
        self._decoder, self._cache, self._angles = decoder, cache, angles
        self._graphs, device = graphs, cache.device
        self._lengths = [length for length in LENGTHS if length <= len(angles.positions)]
        self._seen = Counter[int]()
        longest = max(self._lengths, default=0)
        self._ids = torch.zeros(1, longest, dtype=torch.int64, device=device)
        self._positions = torch.arange(longest, device=device)
        self._slots = torch.zeros(longest, dtype=torch.int64, device=device)

    def read(self, ids: Sequence[int], segments: Sequence[Segment]) -> bool:
        """Store keys and values of the segments' tokens; return False if they must be launched."""
        length = self._length(segments)
        if length is None:
            return False
        self._seen[length] += 1
        if self._seen[length] <= LAUNCHED or not self._has_room():
            return False
        [segment] = segments
        padding = torch.arange(length - segment.count) % PAGE_TOKENS
        slots = slots_of(torch.tensor(segment.pages, dtype=torch.int32), 0, segment.end)
        padded = torch.cat([slots, self._cache.spare * PAGE_TOKENS + padding])
        self._slots[:length] = on_device(padded, self._cache.device)
        texts = torch.tensor([[*ids, *[0] * (length - segment.count)]])
        self._ids[:, :length] = on_device(texts, self._cache.device)
        self._graphs.replay(("start", length), partial(self._pass, length))
        return True

    def _length(self, segments: Sequence[Segment]) -> int | None:
        """Return the tokens of the recording for segments, None if there is none for them."""
        if not self._graphs.records or len(segments) != 1 or segments[0].begin:
            return None
        count = segments[0].count
        fitting = [own for own in self._lengths if count <= own < count + MOST_PADDED]
        return fitting[0] if fitting and count > FEW_ROWS else None

    def _has_room(self) -> bool:
        device = self._cache.device
        return device.type != "cuda" or free_memory(device) >= LEAST_FREE

    def _pass(self, length: int) -> None:
        view = StartView(self._cache, self._positions[:length], self._slots[:length])
        self._decoder.fill(self._ids[:, :length], view, self._angles.at(view.positions))
