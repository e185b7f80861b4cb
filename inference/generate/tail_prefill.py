"""Prefill of prompt tails behind a cached prefix: few tokens, read by CUDA graphs."""

from collections.abc import Sequence
from functools import partial
from itertools import islice

import torch

from exl2flow.inference.cache.paged import PagedCache, pages_of
from exl2flow.inference.cache.views import MOST_STEPS, Segment, StepView
from exl2flow.kernels import STEP_TOKENS, on_device
from exl2flow.kernels.cuda.graphs import GraphPool, bucket
from exl2flow.model import Decoder, RopeTables

MAX_TAILS = 4  # sequences of a pass


class TailPrefill:
    """Reads up to `STEP_TOKENS` tokens of each of a few sequences per replay.

    What is read beyond the end of a sequence is written again later, or to the spare page.
    """

    def __init__(
        self, decoder: Decoder, cache: PagedCache, angles: RopeTables, graphs: GraphPool
    ) -> None:
        """Take the angles of all positions of a sequence, and of `STEP_TOKENS` beyond its end."""
        self._decoder, self._cache, self._angles = decoder, cache, angles
        self._graphs = graphs
        self._width, device = pages_of(len(angles.positions)), cache.device
        self._ids = torch.zeros(MAX_TAILS, STEP_TOKENS, dtype=torch.int64, device=device)
        self._begins = torch.zeros(MAX_TAILS, dtype=torch.int32, device=device)
        shape = (MAX_TAILS, self._width)
        self._tables = torch.full(shape, cache.spare, dtype=torch.int32, device=device)

    def takes(self, segments: Sequence[Segment]) -> bool:
        """Return whether all segments are short tails, and passes are recorded."""
        longest = MOST_STEPS * STEP_TOKENS
        if len(segments) > MAX_TAILS or self._graphs.is_launched(_key(bucket(len(segments)))):
            return False
        return all(s.begin and s.count <= longest for s in segments)

    def read(self, ids: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Store keys and values of the segments' tokens; return their states (t, hidden)."""
        batch, left = bucket(len(segments)), iter(ids)
        texts = [[*islice(left, s.count)] for s in segments]
        hidden: list[list[torch.Tensor]] = [[] for _ in texts]
        idle = [()] * (batch - len(segments))
        self._put(self._tables, [*(s.pages for s in segments), *idle], self._cache.spare)
        for begin in range(0, max(map(len, texts)), STEP_TOKENS):
            starts = [min(begin, len(text) - 1) for text in texts]  # at least the last token again
            pairs = [*zip(texts, starts, strict=True)]
            self._put(self._ids, [text[at : at + STEP_TOKENS] for text, at in pairs], 0)
            begins = [s.begin + at for s, at in zip(segments, starts, strict=True)]
            self._begins[: len(begins)] = on_device(torch.tensor(begins).int(), self._cache.device)
            states = self._graphs.replay(_key(batch), partial(self._pass, batch))
            for text, of_text, x in zip(texts, hidden, states, strict=False):
                of_text.append(x[: max(0, len(text) - begin)].clone())
        return torch.cat([x for of_text in hidden for x in of_text])

    def warm_up(self) -> None:
        """Record the passes."""
        self._tables.fill_(self._cache.spare)  # the pages of the last pass may belong to others
        for batch in sorted({bucket(count) for count in range(1, MAX_TAILS + 1)}):
            self._graphs.make(_key(batch), partial(self._pass, batch))

    def _pass(self, batch: int) -> torch.Tensor:
        view = StepView(self._cache, self._tables[:batch], self._begins[:batch], count=STEP_TOKENS)
        return self._decoder.hidden(self._ids[:batch], view, self._angles.at(view.positions))

    def _put(self, tensor: torch.Tensor, lists: Sequence[Sequence[int]], fill: int) -> None:
        width = tensor.shape[1]
        values = torch.tensor([[*ids, *[fill] * (width - len(ids))] for ids in lists])
        tensor[: len(lists)] = on_device(values.to(tensor.dtype), tensor.device)


def _key(batch: int) -> tuple[str, int]:
    """Return the key of the recorded pass over so many tails."""
    return "tails", batch
