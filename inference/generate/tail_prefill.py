"""Ends of prompts whose beginnings are in the cache: few tokens, read in recorded passes."""

from collections.abc import Sequence
from functools import partial
from itertools import islice

import torch

from exl2flow.inference.cache.paged import PagedCache, pages_of
from exl2flow.inference.cache.views import MOST_STEPS, Segment, StepView
from exl2flow.kernels import FEW_ROWS, STEP_TOKENS, on_device
from exl2flow.kernels.cuda.graphs import GraphPool, bucket
from exl2flow.model import Decoder, RopeTables

MOST = FEW_ROWS // STEP_TOKENS  # sequences of a pass


class TailPrefill:
    """Reads up to `STEP_TOKENS` tokens of each of a few sequences per replay.

    What is read beyond the end of a sequence is written again later, or to the spare page.
    """

    def __init__(
        self, decoder: Decoder, cache: PagedCache, angles: RopeTables, graphs: GraphPool
    ) -> None:
        """Take the angles of all positions of a sequence, and of `STEP_TOKENS` behind them."""
        self._decoder, self._cache, self._angles = decoder, cache, angles
        self._graphs = graphs
        self._width, device = pages_of(len(angles.positions)), cache.device
        self._ids = torch.zeros(MOST, STEP_TOKENS, dtype=torch.int64, device=device)
        self._begins = torch.zeros(MOST, dtype=torch.int32, device=device)
        shape = (MOST, self._width)
        self._tables = torch.full(shape, cache.spare, dtype=torch.int32, device=device)

    def takes(self, segments: Sequence[Segment]) -> bool:
        """Return whether all of these are such ends, and passes are recorded."""
        most = MOST_STEPS * STEP_TOKENS
        are_short = all(s.begin and s.count <= most for s in segments)
        return self._graphs.records and len(segments) <= MOST and are_short

    def read(self, ids: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Store keys and values of the segments' tokens; return their states (t, hidden)."""
        rows, left = bucket(len(segments)), iter(ids)
        texts = [[*islice(left, s.count)] for s in segments]
        found: list[list[torch.Tensor]] = [[] for _ in texts]
        idle = [()] * (rows - len(segments))
        self._put(self._tables, [*(s.pages for s in segments), *idle], self._cache.spare)
        for begin in range(0, max(map(len, texts)), STEP_TOKENS):
            places = [min(begin, len(text) - 1) for text in texts]  # at least the last token again
            pairs = [*zip(texts, places, strict=True)]
            self._put(self._ids, [text[at : at + STEP_TOKENS] for text, at in pairs], 0)
            begins = [s.begin + at for s, at in zip(segments, places, strict=True)]
            self._begins[: len(begins)] = on_device(torch.tensor(begins).int(), self._cache.device)
            states = self._graphs.replay(("tails", rows), partial(self._pass, rows))
            for text, of_text, x in zip(texts, found, states, strict=False):
                of_text.append(x[: max(0, len(text) - begin)].clone())
        return torch.cat([x for of_text in found for x in of_text])

    def warm_up(self) -> None:
        """Record the passes."""
        self._tables.fill_(self._cache.spare)  # the pages of the last pass may belong to others
        for rows in sorted({bucket(count) for count in range(1, MOST + 1)}):
            self._graphs.make(("tails", rows), partial(self._pass, rows))

    def _pass(self, rows: int) -> torch.Tensor:
        view = StepView(self._cache, self._tables[:rows], self._begins[:rows], count=STEP_TOKENS)
        return self._decoder.hidden(self._ids[:rows], view, self._angles.at(view.positions))

    def _put(self, there: torch.Tensor, rows: Sequence[Sequence[int]], fill: int) -> None:
        width = there.shape[1]
        values = torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
        there[: len(rows)] = on_device(values.to(there.dtype), there.device)
