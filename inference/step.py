"""A decoding step from ids to sampled ids: launched anew for every token, or replayed.

Both kinds are begun with ids and settings; each call then takes draws, and samples the ids that the
next call reads.
"""

from collections.abc import Callable
from functools import cached_property

import torch

from exl2flow.inference.cache.contiguous import ContiguousCache
from exl2flow.inference.cache.layered import check_room
from exl2flow.inference.cache.paged import PagedCache
from exl2flow.inference.sampling import SamplerRows, sample
from exl2flow.model import Decoder, RopeTable, step_table
from exl2flow.model.footprint import PROMPT_TOKENS

WARM_UP = 2  # steps before a recording: kernels are compiled, plans and workspaces made

Cache = PagedCache | ContiguousCache


class LaunchedStep:
    """Any number of tokens for each sequence of a cache, on any device.

    A long prompt is read in pieces, so that the memory it takes does not grow with its length.

    logits: fp32 (b, 1, v), those that the last call sampled from.
    """

    ahead = 0  # calls that are worth making before the ids of the last one are read
    logits: torch.Tensor

    def __init__(self, decoder: Decoder, cache: Cache) -> None:
        self._decoder = decoder
        self._cache = cache

    def begin(self, ids: torch.Tensor, rows: SamplerRows) -> None:
        """Set the ids (b, t) that the next call reads, and how all calls sample."""
        self.ids = ids
        self._rows = rows

    def __call__(self, draws: torch.Tensor) -> torch.Tensor:
        """Return ids int64 (b,), sampled with draws fp64 (b,).

        Raises:
            ContextOverflow: the cache has no room for the ids that are read.
        """
        batch, count = self.ids.shape
        check_room(self._cache.length + count, self._cache.max_tokens)  # before any is read
        for part in torch.split(self.ids, max(1, PROMPT_TOKENS // batch), dim=1):
            hidden = self._decoder.hidden(part, self._cache)
        self.logits = self._decoder.head(hidden[:, -1:])
        self.ids = sample(self.logits[:, 0], self._rows, draws)[:, None]
        return self.ids[:, 0]


class Recording:
    """Work on a GPU that is replayed on the memory that it was recorded with."""

    def __init__(self, work: Callable[[], torch.Tensor], beside: "Recording | None" = None) -> None:
        """Record work, in the memory of another recording if they are replayed in turn only.

        Raises:
            RuntimeError: part of it waits for the device, or memory is short.
        """
        for _ in range(WARM_UP):
            work()
        self._graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside._graph.pool()
        with torch.cuda.graph(self._graph, pool=pool):
            self.result = work()

    def replay(self) -> None:
        """Do it again; the result is overwritten."""
        self._graph.replay()


class RecordedStep:
    """One token for each sequence of a cache with pages, on a GPU.

    Ids, lengths, settings and draws are read from memory of its own, which is set before replays;
    the sampled ids are written to where the next replay reads its ids. There is one recording for
    each `SamplerRows.most`.
    """

    ahead = 1  # the device goes on while the host reads

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        """Take a decoder that is on a GPU as a whole, and a cache that no other step changes."""
        self._decoder = decoder
        self._cache = cache
        batch, device = len(cache.places.tables), cache.places.lengths.device
        self._ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._draws = torch.zeros(batch, dtype=torch.float64, device=device)
        self._table = torch.zeros(batch, 4, dtype=torch.float64, device=device)
        self._recordings = dict[int | None, Recording]()

    def begin(self, ids: torch.Tensor, rows: SamplerRows) -> None:
        """Set the ids (b, 1) that the next call reads, and how all calls sample.

        Settings of a kind that is new are recorded first; the cache has room for one more then.

        Raises:
            RuntimeError: a part of the step waits for the device, or memory is short.
        """
        self._table.copy_(rows.table)
        if rows.most not in self._recordings:
            self._recordings[rows.most] = self._recorded(rows.most)
        self._recording = self._recordings[rows.most]
        self._ids.copy_(ids)

    def __call__(self, draws: torch.Tensor) -> torch.Tensor:
        """Return ids int64 (b,), sampled with draws fp64 (b,), which the next call overwrites.

        Raises:
            ContextOverflow: the cache has no room for one more.
        """
        cache = self._cache
        check_room(cache.length + 1, cache.max_tokens)
        self._draws.copy_(draws)
        cache.places.lengths.fill_(cache.length)
        cache.places.forget()
        self._recording.replay()
        cache.lengthen(1)
        return self._ids[:, 0]

    @property
    def logits(self) -> torch.Tensor:
        """The logits fp32 (b, 1, v) that the last call sampled from; the next overwrites them."""
        return self._recording.result

    @cached_property
    def _angles(self) -> RopeTable:
        cache = self._cache
        return step_table(self._decoder.spec.rope, cache.max_tokens, cache.places.lengths.device)

    def _recorded(self, most: int | None) -> Recording:
        cache, places = self._cache, self._cache.places
        rows, angles = SamplerRows(table=self._table, most=most), self._angles
        held = cache.length

        def work() -> torch.Tensor:
            before = cache.length
            places.slots = places.next_slots()
            logits = self._decoder.forward(self._ids, cache, angles.at(places.lengths))
            cache.truncate(before)  # what is written meanwhile lies where the next token will
            self._ids.copy_(sample(logits[:, 0], rows, self._draws)[:, None])
            return logits

        places.stand_at(held)  # what layers find so they leave to the recording
        try:
            return Recording(work, beside=next(iter(self._recordings.values()), None))
        finally:
            cache.truncate(held)
            places.forget()


def can_be_recorded(decoder: Decoder, cache: PagedCache) -> bool:
    """Tell whether it is worth trying: the cache is on a GPU, the decoder in memory as a whole."""
    return cache.places.lengths.is_cuda and isinstance(decoder.sublayers, list)
