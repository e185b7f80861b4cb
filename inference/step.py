"""A decoding step as one recording: what Python would launch again for every token is replayed."""

import torch

from exl2flow.inference.cache.layered import check_room
from exl2flow.inference.cache.paged import PagedCache
from exl2flow.model import Decoder, step_table

WARM_UP = 2  # steps before a recording: kernels are compiled, plans and workspaces made


class RecordedStep:
    """One token for each sequence of a cache, on a GPU.

    The recording reads ids and lengths from memory of its own, which is set before each replay.
    """

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        """Record the step of a decoder that is on a GPU as a whole; the cache has room for one.

        Raises:
            RuntimeError: part of it waits for the device, or memory is short.
        """
        self.cache = cache
        places, device = cache.places, cache.places.lengths.device
        self._ids = torch.zeros(len(places.tables), 1, dtype=torch.int64, device=device)
        self._graph = torch.cuda.CUDAGraph()
        held = cache.length
        self._table = table = step_table(decoder.spec.rope, cache.max_tokens, device)

        def work() -> torch.Tensor:
            places.slots = places.next_slots()
            logits = decoder.forward(self._ids, cache, table.at(places.lengths))
            cache.truncate(held)  # what is written meanwhile lies where the next token will
            return logits

        places.stand_at(held)  # what layers find so they leave to the recording
        try:
            for _ in range(WARM_UP):
                work()
            with torch.cuda.graph(self._graph):
                self._logits = work()
        finally:
            cache.truncate(held)
            places.forget()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits fp32 (b, 1, v) of ids (b, 1), which the next call overwrites.

        Raises:
            ContextOverflow: the cache has no room for one more.
        """
        cache = self.cache
        check_room(cache.length + 1, cache.max_tokens)
        self._ids.copy_(ids)
        cache.places.lengths.fill_(cache.length)
        cache.places.forget()
        self._graph.replay()
        cache.lengthen(1)
        return self._logits
