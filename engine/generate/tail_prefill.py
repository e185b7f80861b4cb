"""Prefill of prompt tails behind a cached prefix: few tokens, read by CUDA graphs."""

from collections.abc import Sequence
from itertools import islice

import torch

from exl2flow.engine.cache.paged import pages_of
from exl2flow.engine.cache.views import MOST_STEPS, TAIL_TOKENS, Segment
from exl2flow.engine.generate.passes import Passes, Sequences, SpanPlace
from exl2flow.kernels import on_device
from exl2flow.kernels.cuda.graphs import bucket
from exl2flow.model import Decoder

MAX_TAILS = 4  # sequences of a pass


class TailPrefill:
    """Reads up to `TAIL_TOKENS` tokens of each of a few sequences per replay.

    What is read beyond the end of a sequence is written again later, or to the spare page.
    """

    def __init__(self, decoder: Decoder, places: Sequence[SpanPlace]) -> None:
        """Take rotations of all positions of a sequence, and of `TAIL_TOKENS` beyond its end."""
        cache, count = places[-1].cache, len(places[-1].angles.positions)
        width = pages_of(count, cache.page_tokens)
        self._device, self._spare = cache.device, cache.spare
        shapes = (MAX_TAILS, width), (MAX_TAILS,), (MAX_TAILS, TAIL_TOKENS)
        types = torch.int32, torch.int32, torch.int64
        self._tails = Sequences(
            *(
                torch.zeros(shape, dtype=dtype, device=cache.device)
                for shape, dtype in zip(shapes, types, strict=True)
            )
        )
        self._tails.tables.fill_(self._spare)
        self._passes = Passes(
            places, self._tails, decoder=lambda batch: decoder, end=lambda decoder, hidden: hidden
        )

    def takes(self, segments: Sequence[Segment]) -> bool:
        """Return whether all segments are short tails, and passes are recorded."""
        longest = MOST_STEPS * TAIL_TOKENS
        if len(segments) > MAX_TAILS or self._passes.are_launched(_key(bucket(len(segments)))):
            return False
        return all(s.begin and s.count <= longest for s in segments)

    def read(self, ids: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Store keys and values of the segments' tokens; return their states (t, hidden)."""
        batch, left = bucket(len(segments)), iter(ids)
        texts = [[*islice(left, s.count)] for s in segments]
        hidden: list[list[torch.Tensor]] = [[] for _ in texts]
        idle = [()] * (batch - len(segments))
        self._put(self._tails.tables, [*(s.pages for s in segments), *idle], self._spare)
        self._passes.tables_changed()
        for begin in range(0, max(map(len, texts)), TAIL_TOKENS):
            starts = [min(begin, len(text) - 1) for text in texts]  # at least the last token again
            pairs = [*zip(texts, starts, strict=True)]
            self._put(self._tails.ids, [text[at : at + TAIL_TOKENS] for text, at in pairs], 0)
            begins = [s.begin + at for s, at in zip(segments, starts, strict=True)]
            self._tails.lengths[: len(begins)] = on_device(torch.tensor(begins).int(), self._device)
            states = self._passes.run(_key(batch), batch, TAIL_TOKENS)
            for text, of_text, x in zip(texts, hidden, states, strict=False):
                of_text.append(x[: max(0, len(text) - begin)].clone())
        return torch.cat([x for of_text in hidden for x in of_text])

    def warm_up(self) -> None:
        """Record the passes."""
        self._tails.tables.fill_(self._spare)  # the pages of the last pass may belong to others
        self._passes.tables_changed()
        for batch in sorted({bucket(count) for count in range(1, MAX_TAILS + 1)}):
            self._passes.make(_key(batch), batch, TAIL_TOKENS)

    def _put(self, tensor: torch.Tensor, lists: Sequence[Sequence[int]], fill: int) -> None:
        width = tensor.shape[1]
        values = torch.tensor([[*ids, *[fill] * (width - len(ids))] for ids in lists])
        tensor[: len(lists)] = on_device(values.to(tensor.dtype), tensor.device)


def _key(batch: int) -> tuple[str, int]:
    """Return the key of the recorded pass over a number of tails."""
    return "tails", batch
