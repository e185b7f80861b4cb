"""A decoding step from ids to sampled ids: launched again for every token, or replayed.

Both begin with ids and a kind of sampling; each call then takes random draws, and samples the ids
that the next call reads.
"""

from collections.abc import Callable
from functools import cached_property

import torch

from exl2flow.inference.cache.contiguous import ContiguousCache
from exl2flow.inference.cache.layered import check_room
from exl2flow.inference.cache.paged import PagedCache
from exl2flow.inference.sampling import Kind, SamplerSlots, sample
from exl2flow.model import Decoder, RopeTable, step_table
from exl2flow.model.footprint import PROMPT_TOKENS

WARM_UP = 2  # steps before a recording, to compile kernels and create plans and workspaces

Cache = PagedCache | ContiguousCache


class LaunchedStep:
    """Decode any number of tokens per sequence of a cache, on any device.

    A long prompt is read in pieces, so its memory does not grow with its length.

    logits: fp32 (b, 1, v), which the last call sampled from.
    """

    ahead = 0  # calls worth making before the ids of the last one are read
    logits: torch.Tensor

    def __init__(self, decoder: Decoder, cache: Cache, slots: SamplerSlots) -> None:
        self._decoder = decoder
        self._cache = cache
        self._slots = slots

    def begin(self, ids: torch.Tensor, kind: Kind) -> None:
        """Set the ids (b, t) that the next call reads, and how all calls sample."""
        self.ids = ids
        self._kind = kind

    def __call__(self, draws: torch.Tensor) -> torch.Tensor:
        """Return ids int64 (b,), sampled with draws fp64 (b,).

        Raises:
            ContextOverflow: the cache has no room for the ids.
        """
        batch, count = self.ids.shape
        check_room(self._cache.length + count, self._cache.max_tokens)  # before reading any
        for part in torch.split(self.ids, max(1, PROMPT_TOKENS // batch), dim=1):
            hidden = self._decoder.hidden(part, self._cache)
        self.logits = self._decoder.head(hidden[:, -1:])
        self.ids = sample(self.logits[:, 0], self._slots, draws, self._kind).ids[:, None]
        return self.ids[:, 0]


class Recording:
    """Recorded GPU work, replayed on the memory it was recorded with."""

    def __init__(self, work: Callable[[], torch.Tensor], beside: "Recording | None" = None) -> None:
        """Record work, in the memory of `beside` if the two never run at the same time.

        Raises:
            RuntimeError: part of it waits for the device, or memory runs out.
        """
        for _ in range(WARM_UP):
            work()
        self._graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside._graph.pool()
        with torch.cuda.graph(self._graph, pool=pool):
            self.result = work()

    def replay(self) -> None:
        """Replay the work; the result is overwritten."""
        self._graph.replay()


class RecordedStep:
    """Decode one token per sequence of a paged cache, on a GPU.

    It reads ids, lengths and draws from its own memory, which is set before replays, and writes
    sampled ids where the next replay reads its ids. There is one recording per kind of sampling.
    """

    ahead = 1  # the device continues while the host reads

    def __init__(self, decoder: Decoder, cache: PagedCache, slots: SamplerSlots) -> None:
        """Take a decoder that is entirely on a GPU, and a cache that no other step changes."""
        self._decoder = decoder
        self._cache = cache
        batch, device = len(cache.places.tables), cache.places.lengths.device
        self._ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._draws = torch.zeros(batch, dtype=torch.float64, device=device)
        self._slots = slots
        self._recordings = dict[Kind, Recording]()

    def begin(self, ids: torch.Tensor, kind: Kind) -> None:
        """Set the ids (b, 1) that the next call reads, and how all calls sample.

        A new kind is recorded first; the cache then needs room for one more token.

        Raises:
            RuntimeError: part of the step waits for the device, or memory runs out.
        """
        if kind not in self._recordings:
            self._recordings[kind] = self._recorded(kind)
        self._recording = self._recordings[kind]
        self._ids.copy_(ids)

    def __call__(self, draws: torch.Tensor) -> torch.Tensor:
        """Return ids int64 (b,), sampled with draws fp64 (b,); the next call overwrites them.

        Raises:
            ContextOverflow: the cache has no room for one more token.
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
        """Logits fp32 (b, 1, v) that the last call sampled from; the next call overwrites them."""
        return self._recording.result

    @cached_property
    def _angles(self) -> RopeTable:
        cache = self._cache
        return step_table(self._decoder.spec.rope, cache.max_tokens, cache.places.lengths.device)

    def _recorded(self, kind: Kind) -> Recording:
        cache, places, slots = self._cache, self._cache.places, self._slots
        angles, held, state = self._angles, cache.length, (slots.counts.clone(), slots.mu.clone())

        def work() -> torch.Tensor:
            before = cache.length
            places.slots = places.next_slots()
            logits = self._decoder.forward(self._ids, cache, angles.at(places.lengths))
            cache.truncate(before)  # these writes land where the next token will be stored
            self._ids.copy_(sample(logits[:, 0], slots, self._draws, kind).ids[:, None])
            return logits

        places.stand_at(held)  # set here, so that layers do not while recording
        try:
            return Recording(work, beside=next(iter(self._recordings.values()), None))
        finally:
            cache.truncate(held)
            places.forget()
            slots.counts.copy_(state[0])  # the warm-up sampled, too
            slots.mu.copy_(state[1])


def can_be_recorded(decoder: Decoder, cache: PagedCache) -> bool:
    """Return whether to try recording: the cache is on a GPU, the decoder entirely in memory."""
    return cache.places.lengths.is_cuda and isinstance(decoder.sublayers, list)
