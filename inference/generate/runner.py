"""Runs a model over prompts, and over the last tokens of slots as a CUDA graph per device.

A model on several devices is passed from one to the next: each has graphs of its own layers, and
its own copy of the slots' state, which lies with the head. Before a step the other devices get
lengths, the first one ids as well; hidden states then cross each border in one copy.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import torch

from exl2flow.inference.adapters import AdapterSlots
from exl2flow.inference.cache.views import PromptView, Segment, StepView
from exl2flow.inference.drafts import SharedSlots
from exl2flow.inference.generate.draft_positions import DraftPositions
from exl2flow.inference.generate.tail_prefill import TailPrefill
from exl2flow.kernels.cuda.graphs import GraphPool
from exl2flow.model import Decoder, KvCache, LayerCache, RopeTables
from exl2flow.model.layers.span import Span

T = TypeVar("T")
Idle = Callable[[], AbstractContextManager[None]]  # see `GraphPool`


class _SpanSlots:
    """The slots' state on the device of a span of layers."""

    def __init__(
        self,
        span: Span,
        slots: SharedSlots,
        ids: torch.Tensor,
        angles: RopeTables,
        graphs: GraphPool,
    ) -> None:
        self.span, self.angles, self.graphs = span, angles, graphs
        self.is_home = span.device == slots.cache.device
        self.cache = slots.cache.at(span.device)
        self.tables, self.lengths, self.ids = (
            x if self.is_home else x.to(span.device) for x in (slots.tables, slots.lengths, ids)
        )


class Runner:
    """Passes of a model; its decode steps read `ids` and write the logits of draft positions."""

    def __init__(
        self,
        decoder: Decoder,
        slots: SharedSlots,
        ids: torch.Tensor,
        positions: DraftPositions,
        adapters: AdapterSlots,
        *,
        idle: Idle,
        max_tokens: int,
    ) -> None:
        """Take the slots' state; `max_tokens`: positions of a sequence, and some beyond its end."""
        self._decoder, self._slots, self._ids = decoder, slots, ids
        self._positions, self._adapters = positions, adapters
        self._spans, self._is_stale = list[_SpanSlots](), False
        is_split = decoder.placement.is_split
        for span in decoder.spans:
            graphs = slots.graphs
            if is_split:
                graphs = GraphPool(idle, records=slots.graphs.records, device=span.device)
                adapters.on_move(graphs.forget)
            angles = RopeTables.of(decoder.spec, max_tokens, span.device)
            self._spans.append(_SpanSlots(span, slots, ids, angles, graphs))
        shape, dtype = (ids.numel(), decoder.spec.hidden_size), decoder.embedding.weight.dtype
        self._entering = [  # hidden states (slots · tokens, hidden) that another device computed
            torch.zeros(shape, dtype=dtype, device=span.device) for span in decoder.spans[1:]
        ]
        self._tails: TailPrefill | None = None
        if not is_split and slots.cache.states is None:
            angles = self._spans[0].angles
            self._tails = TailPrefill(decoder, slots.cache, angles, slots.graphs)

    def views(self, segments: Sequence[Segment]) -> tuple[KvCache, RopeTables]:
        """Return the cache and the rotations for a pass over prompts."""
        views = [PromptView(slots.cache, segments) for slots in self._spans]
        pairs = zip(self._spans, views, strict=True)
        angles = [slots.angles.at(view.positions) for slots, view in pairs]
        if len(views) == 1:
            return views[0], angles[0]
        table = RopeTables(
            tables=tuple(one.layer(i) for i, one in enumerate(self._of_layer(angles))),
            of_layer=tuple(range(self._decoder.spec.num_layers)),
            positions=angles[0].positions,
        )
        return _LayerViews(self._of_layer(views)), table

    def read_tails(self, ids: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor | None:
        """Read the ends of prompts as `TailPrefill.read` does; None: take `views` for these."""
        if self._tails is None or not self._tails.takes(segments):
            return None
        return self._tails.read(ids, segments)

    def forward(self, batch: int, count: int) -> None:
        """Run `count` tokens of each of the first slots, and store their logits."""
        self._update(batch, count)
        for index, slots in enumerate(self._spans):
            hidden = slots.graphs.replay(*self._step(index, batch, count))
            if hidden is not None:
                entering = self._entering[index][: batch * count]
                entering.copy_(hidden.flatten(0, 1), non_blocking=True)

    def copy(self, pages: torch.Tensor) -> None:
        """Copy pages, int64 (2, n)."""
        copy = partial(self._slots.cache.copy, pages)
        copy() if len(self._spans) > 1 else self._slots.graphs.replay(("copy",), copy)

    def tables_changed(self) -> None:
        """Note that slots have other pages."""
        self._is_stale = True

    def warm_up(self, steps: Sequence[tuple[int, int]]) -> None:
        """Record steps of these batch sizes and tokens per slot."""
        if self._tails is not None:
            self._tails.warm_up()
        self.tables_changed()  # pages of the last step may belong to others
        for batch, count in steps:
            self._update(batch, count)
            for index, slots in enumerate(self._spans):
                slots.graphs.make(*self._step(index, batch, count))

    def _step(
        self, index: int, batch: int, count: int
    ) -> tuple[tuple[object, ...], Callable[[], torch.Tensor | None]]:
        """Return the key and the work of a span's graph."""
        return (batch, count, self._adapters.mark), partial(self._pass, index, batch, count)

    def _pass(self, index: int, batch: int, count: int) -> torch.Tensor | None:
        """Return the output of a span; the last one stores logits instead."""
        slots, decoder = self._spans[index], self._adapters.for_slots(batch)
        view = StepView(slots.cache, slots.tables[:batch], slots.lengths[:batch], count=count)
        table = slots.angles.at(view.positions)
        if index:
            hidden = self._entering[index - 1][: batch * count].view(batch, count, -1)
        else:
            hidden = decoder.embed(slots.ids[:batch, :count], positions=table.positions)
        hidden = decoder.spans[index](hidden, start=table, cache=view)
        if slots is not self._spans[-1]:
            return hidden
        self._positions.put(decoder.head(hidden))
        return None

    def _update(self, batch: int, count: int) -> None:
        """Bring the other devices up to date."""
        for slots in self._spans:
            if slots.is_home:
                continue
            slots.lengths[:batch].copy_(self._slots.lengths[:batch], non_blocking=True)
            if self._is_stale:
                slots.tables.copy_(self._slots.tables, non_blocking=True)
            if slots is self._spans[0]:
                slots.ids[:batch, :count].copy_(self._ids[:batch, :count], non_blocking=True)
        self._is_stale = False

    def _of_layer(self, parts: Sequence[T]) -> Iterator[T]:
        """Yield each layer's part of those of the spans."""
        for slots, part in zip(self._spans, parts, strict=True):
            yield from (part for _ in slots.span.layers)


class _LayerViews:
    """A `KvCache` whose layers are seen by views on their own devices."""

    orders_results = False

    def __init__(self, of_layer: Iterator[PromptView]) -> None:
        self._of_layer = [*of_layer]

    def layer(self, index: int) -> LayerCache:
        return self._of_layer[index].layer(index)
