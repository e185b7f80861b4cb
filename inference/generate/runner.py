"""Passes of a model over prompts, and over the last tokens of slots; the latter are recorded.

A model on several devices is passed from one to the next: each has its own recording of its layers,
and its own copy of what a view of the cache needs, with the slots' state on the head's device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch

from exl2flow.inference.adapters import AdapterSlots
from exl2flow.inference.cache.paged import PagedCache
from exl2flow.inference.cache.views import PromptView, Segment, StepView
from exl2flow.inference.generate.draft_positions import DraftPositions
from exl2flow.inference.generate.tail_prefill import TailPrefill
from exl2flow.kernels.cuda.graphs import GraphPool
from exl2flow.model import Decoder, KvCache, LayerCache, RopeTables
from exl2flow.model.layers.span import Span

T = TypeVar("T")
Idle = Callable[[], AbstractContextManager[None]]  # see `Recordings`


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What passes share with the slots of `Steps`, all on the device of the head.

    most: positions of a sequence, and of what a pass reads beyond its end.
    """

    decoder: Decoder
    cache: PagedCache
    tables: torch.Tensor
    lengths: torch.Tensor
    ids: torch.Tensor
    places: DraftPositions
    adapters: AdapterSlots
    graphs: GraphPool
    idle: Idle
    most: int


class Runner(Protocol):
    """How a model is run."""

    def views(self, segments: Sequence[Segment]) -> tuple[KvCache, RopeTables]:
        """Return what a pass over prompts takes."""

    def read_ends(self, ids: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor | None:
        """Read ends of prompts as `TailPrefill.read` does; None: take `views` for these."""

    def forward(self, rows: int, count: int) -> None:
        """Put the logits behind the next `count` tokens of the first slots in their places."""

    def copy(self, pages: torch.Tensor) -> None:
        """Copy pages, int64 (2, n)."""

    def tables_changed(self) -> None:
        """Note that slots have other pages."""

    def warm_up(self, steps: Sequence[tuple[int, int]]) -> None:
        """Record passes over so many rows and tokens of each."""


class SingleRunner:
    """Passes of a model on one device."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._angles = RopeTables.of(state.decoder.spec, state.most, state.cache.device)
        self._tails = TailPrefill(state.decoder, state.cache, self._angles, state.graphs)

    def views(self, segments: Sequence[Segment]) -> tuple[KvCache, RopeTables]:
        view = PromptView(self._state.cache, segments)
        return view, self._angles.along(view.positions)

    def read_ends(self, ids: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor | None:
        return self._tails.read(ids, segments) if self._tails.takes(segments) else None

    def forward(self, rows: int, count: int) -> None:
        self._state.graphs.replay(*self._step(rows, count))

    def copy(self, pages: torch.Tensor) -> None:
        self._state.graphs.replay(("copy",), partial(self._state.cache.copy, pages))

    def tables_changed(self) -> None:
        """Do nothing: passes read the slots' own tables."""

    def warm_up(self, steps: Sequence[tuple[int, int]]) -> None:
        self._tails.warm_up()
        for rows, count in steps:
            self._state.graphs.make(*self._step(rows, count))

    def _step(self, rows: int, count: int) -> tuple[tuple[object, ...], Callable[[], None]]:
        return (rows, count, self._state.adapters.mark), partial(self._forward, rows, count)

    def _forward(self, rows: int, count: int) -> None:
        s = self._state
        view = StepView(s.cache, s.tables[:rows], s.lengths[:rows], count=count)
        work = s.ids[:rows, :count], view, self._angles.at(view.positions)
        s.places.put(s.adapters.for_slots(rows).forward(*work))


class _Leg:
    """A span of layers, and what its passes read on its device.

    entering: hidden states (slots · tokens, hidden) that another device computed.
    """

    def __init__(self, span: Span, state: State, hidden_size: int) -> None:
        self.span, device = span, span.device
        self.cache = state.cache.at(device)
        self.is_home = device == state.cache.device
        self.tables, self.lengths, self.ids = (
            x if self.is_home else x.to(device) for x in (state.tables, state.lengths, state.ids)
        )
        dtype = state.decoder.embedding.weight.dtype
        self.entering = torch.zeros(state.ids.numel(), hidden_size, dtype=dtype, device=device)
        self.angles = RopeTables.of(state.decoder.spec, state.most, device)
        self.graphs = GraphPool(state.idle, records=state.graphs.records, device=device)

    def step(self, rows: int, count: int) -> tuple[KvCache, RopeTables]:
        """Return what a pass over tokens of the first slots takes."""
        view = StepView(self.cache, self.tables[:rows], self.lengths[:rows], count=count)
        return view, self.angles.at(view.positions)


class SplitRunner:
    """Passes of a model on several devices.

    Before a step, the other devices get lengths from the head's, the first one ids as well; hidden
    states then cross each border in one copy.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        hidden_size = state.decoder.spec.hidden_size
        self._legs = [_Leg(span, state, hidden_size) for span in state.decoder.spans]
        self._is_stale = False
        for leg in self._legs:
            state.adapters.tell(leg.graphs.forget)

    def views(self, segments: Sequence[Segment]) -> tuple[KvCache, RopeTables]:
        views = [PromptView(leg.cache, segments) for leg in self._legs]
        pairs = zip(self._legs, views, strict=True)
        angles = [leg.angles.along(view.positions) for leg, view in pairs]
        table = RopeTables(
            tables=tuple(one.layer(i) for i, one in enumerate(self._of_layer(angles))),
            of_layer=tuple(range(self._state.decoder.spec.num_layers)),
            positions=angles[0].positions,
        )
        return _Views(self._of_layer(views)), table

    def read_ends(self, ids: Sequence[int], segments: Sequence[Segment]) -> None:
        return None

    def forward(self, rows: int, count: int) -> None:
        self._follow(rows, count)
        hidden = self._state.ids  # the first leg reads ids instead
        for place, leg in enumerate(self._legs):
            if place:
                leg.entering[: rows * count].copy_(hidden.flatten(0, 1), non_blocking=True)
            hidden = leg.graphs.replay(*self._step(place, rows, count))

    def copy(self, pages: torch.Tensor) -> None:
        self._state.cache.copy(pages)

    def tables_changed(self) -> None:
        self._is_stale = True

    def warm_up(self, steps: Sequence[tuple[int, int]]) -> None:
        for rows, count in steps:
            for place, leg in enumerate(self._legs):
                leg.graphs.make(*self._step(place, rows, count))

    def _step(
        self, place: int, rows: int, count: int
    ) -> tuple[tuple[object, ...], Callable[[], torch.Tensor]]:
        key = rows, count, self._state.adapters.mark
        return key, partial(self._pass, place, rows, count)

    def _pass(self, place: int, rows: int, count: int) -> torch.Tensor:
        """Return the states behind a leg; the last one puts logits in their places."""
        leg, decoder = self._legs[place], self._state.adapters.for_slots(rows)
        view, table = leg.step(rows, count)
        if place:
            hidden = leg.entering[: rows * count].view(rows, count, -1)
        else:
            hidden = decoder.embed(leg.ids[:rows, :count], positions=table.positions)
        hidden = decoder.spans[place](hidden, start=table, cache=view)
        if leg is self._legs[-1]:
            self._state.places.put(decoder.head(hidden))
        return hidden

    def _follow(self, rows: int, count: int) -> None:
        """Bring the other devices up to date."""
        for leg in self._legs:
            if leg.is_home:
                continue
            leg.lengths[:rows].copy_(self._state.lengths[:rows], non_blocking=True)
            if self._is_stale:
                leg.tables.copy_(self._state.tables, non_blocking=True)
            if leg is self._legs[0]:
                leg.ids[:rows, :count].copy_(self._state.ids[:rows, :count], non_blocking=True)
        self._is_stale = False

    def _of_layer(self, parts: Sequence[T]) -> Iterator[T]:
        """Yield each layer's part of those of the legs."""
        for leg, part in zip(self._legs, parts, strict=True):
            yield from (part for _ in leg.span.layers)


class _Views:
    """A `KvCache` whose layers are seen by views on their own devices."""

    def __init__(self, of_layer: Iterator[PromptView]) -> None:
        self._of_layer = [*of_layer]

    def layer(self, index: int) -> LayerCache:
        return self._of_layer[index].layer(index)
