"""Passes of a few tokens of each sequence over a model, recorded once per device and replayed.

A model on several devices is passed from one to the next: each has graphs of its own layers, and
its own copy of what a pass reads, which lies with the head. Before a pass the other devices get
lengths, the first one ids as well; hidden states then cross each border in one copy.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from exl2flow.engine.cache.paged import PagedCache
from exl2flow.engine.cache.views import StepView
from exl2flow.kernels.cuda.graphs import GraphPool
from exl2flow.model import Decoder, RopeTables
from exl2flow.model.layers.span import Span

Key = tuple[Hashable, ...]


class Sequences(NamedTuple):
    """The input of a pass for each sequence: int32 (n, pages), int32 (n,) and int64 (n, tokens)."""

    tables: torch.Tensor
    lengths: torch.Tensor
    ids: torch.Tensor

    def at(self, device: torch.device) -> "Sequences":
        """Return the same, or copies, on a device."""
        return Sequences(*(x.to(device) for x in self))


@dataclass(frozen=True, slots=True)
class SpanPlace:
    """Where a span of layers runs: its device's cache, rotations and recordings."""

    span: Span
    cache: PagedCache
    angles: RopeTables
    graphs: GraphPool


class Passes:
    """Passes over sequences that stay at the same addresses.

    end: makes of the last span's output, (batch, tokens, hidden), what a pass returns; bring: sends
    a tensor of rank 0, which alone knows the sequences, to other ranks; None: all ranks know them.
    """

    def __init__(
        self,
        places: Sequence[SpanPlace],
        sequences: Sequences,
        *,
        decoder: Callable[[int], Decoder],
        end: Callable[[Decoder, torch.Tensor], Any],
        bring: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """`decoder` returns the model for the first `batch` sequences."""
        self._places, self._home = places, sequences
        self._decoder, self._end, self._bring = decoder, end, bring
        self._is_stale = True
        self._of = [sequences.at(place.span.device) for place in places]
        embedding = decoder(1).embedding.weight
        shape = sequences.ids.numel(), embedding.shape[1]
        self._entering = [  # hidden states (sequences · tokens, hidden) of the device before
            torch.zeros(shape, dtype=embedding.dtype, device=place.span.device)
            for place in places[1:]
        ]

    def are_launched(self, key: Key) -> bool:
        """Return whether a part of these passes is never recorded."""
        return any(place.graphs.is_launched(key) for place in self._places)

    def tables_changed(self) -> None:
        """Note that sequences have other pages."""
        self._is_stale = True

    def run(self, key: Key, batch: int, count: int) -> Any:
        """Run `count` tokens of each of the first sequences; `key` is that of the recordings."""
        self._update(batch, count)
        *others, last = range(len(self._places))
        for index in others:
            work = partial(self._pass, index, batch, count)
            hidden = self._places[index].graphs.replay(key, work)
            entering = self._entering[index][: batch * count]
            entering.copy_(hidden.flatten(0, 1), non_blocking=True)
        return self._places[last].graphs.replay(key, partial(self._pass, last, batch, count))

    def make(self, key: Key, batch: int, count: int) -> None:
        """Record a pass."""
        self._update(batch, count)
        for index, place in enumerate(self._places):
            place.graphs.make(key, partial(self._pass, index, batch, count))

    def _pass(self, index: int, batch: int, count: int) -> Any:
        """Return the output of a span; of the last one, what `end` makes of it."""
        place, of, decoder = self._places[index], self._of[index], self._decoder(batch)
        if self._bring is not None:
            sent = torch.cat([of.lengths[:batch, None], of.ids[:batch, :count]], dim=1)
            self._bring(sent)
            of.lengths[:batch], of.ids[:batch, :count] = sent[:, 0], sent[:, 1:]
        view = StepView(place.cache, of.tables[:batch], of.lengths[:batch], count=count)
        table = place.angles.at(view.positions)
        if index:
            hidden = self._entering[index - 1][: batch * count].view(batch, count, -1)
        else:
            hidden = decoder.embed(of.ids[:batch, :count], positions=table.positions)
        hidden = decoder.spans[index](hidden, start=table, cache=view)
        return hidden if place is not self._places[-1] else self._end(decoder, hidden)

    def _update(self, batch: int, count: int) -> None:
        """Bring the other devices and ranks up to date."""
        if self._bring is not None and self._is_stale:
            self._bring(self._home.tables)
        for index, of in enumerate(self._of):
            if of.lengths is self._home.lengths:
                continue
            of.lengths[:batch].copy_(self._home.lengths[:batch], non_blocking=True)
            if self._is_stale:
                of.tables.copy_(self._home.tables, non_blocking=True)
            if index == 0:
                of.ids[:batch, :count].copy_(self._home.ids[:batch, :count], non_blocking=True)
        self._is_stale = False
