"""Runs a model over prompts, and over the last tokens of slots as a CUDA graph per device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import torch

from exl2flow.engine.adapters import AdapterSlots, Used
from exl2flow.engine.cache.views import PromptView, Segment
from exl2flow.engine.drafts import SharedSlots
from exl2flow.engine.generate.draft_positions import DraftPositions
from exl2flow.engine.generate.passes import Key, Passes, Sequences, SpanPlace
from exl2flow.engine.generate.tail_prefill import TailPrefill
from exl2flow.engine.loading.load import LoadedModel
from exl2flow.engine.loading.team import Counterpart, mirrored
from exl2flow.kernels import on_device
from exl2flow.kernels.cuda.graphs import GraphPool
from exl2flow.model import Decoder, KvCache, LayerCache, RopeTables
from exl2flow.model.layers.span import Span

T = TypeVar("T")
Idle = Callable[[], AbstractContextManager[None]]  # see `GraphPool`


class Runner:
    """Passes of a model; its decode steps read `ids` and write the logits of draft positions.

    counterpart: the runners of other ranks, if this process leads them.
    """

    counterpart: Counterpart | None = None

    def __init__(
        self,
        model: LoadedModel,
        slots: SharedSlots,
        ids: torch.Tensor,
        positions: DraftPositions,
        adapters: AdapterSlots,
        *,
        idle: Idle,
        max_tokens: int,
    ) -> None:
        """Take the slots' state; `max_tokens`: positions of a sequence, and some beyond its end."""
        decoder = self._decoder = model.decoder
        self._slots, self._adapters = slots, adapters
        ranks = model.ranks
        self._bring = ranks.bring if ranks is not None and ranks.is_led else None
        self._given: torch.Tensor | None = None  # to the head

        def place(span: Span) -> SpanPlace:
            graphs = slots.graphs
            if decoder.placement.is_split:
                graphs = GraphPool(idle, records=graphs.records, device=span.device)
                adapters.on_move(graphs.forget)
            angles = RopeTables.of(decoder.spec, max_tokens, span.device)
            return SpanPlace(span, slots.cache.at(span.device), angles, graphs)

        self._places = [place(span) for span in decoder.spans]
        self._steps = Passes(
            self._places,
            Sequences(slots.tables, slots.lengths, ids),
            decoder=adapters.for_slots,
            end=self._ended(slots, positions),
            bring=self._bring,
        )
        self._tails: TailPrefill | None = None
        if slots.cache.states is None:
            self._tails = TailPrefill(decoder, self._places)
        self._copies = [  # int64 (2, 1) each, a source and a target
            (place, torch.zeros(2, 1, dtype=torch.int64, device=place.span.device))
            for place in self._places
            if place.cache.here
        ]

    @staticmethod
    def _ended(
        slots: SharedSlots, positions: DraftPositions
    ) -> Callable[[Decoder, torch.Tensor], None]:
        """Return what a step does with the last states (slots, tokens, hidden).

        Of texts that take part, it keeps them for drafts that read them.
        """

        def end(decoder: Decoder, hidden: torch.Tensor) -> None:
            if slots.hidden is not None:
                batch, count, _ = hidden.shape
                begins, kept = slots.begins[:batch], slots.hidden[:batch, :count]
                is_active = slots.active[:batch] > 0
                begins.copy_(torch.where(is_active, slots.lengths[:batch], begins))
                kept.copy_(torch.where(is_active[:, None, None], hidden, kept))
            positions.put(decoder.head(hidden))

        return end

    @mirrored
    def read(
        self,
        ids: Sequence[int],
        segments: Sequence[Segment],
        embeddings: Sequence[torch.Tensor] = (),
        adapters: Sequence[Used] = (),
        *,
        states: bool = False,
    ) -> torch.Tensor | None:
        """See `DeviceSlots.read`; None: hidden states are not wanted."""
        is_plain = not embeddings and not any(adapters)
        if is_plain and self._tails is not None and self._tails.takes(segments):
            return self._tails.read(ids, segments)
        device = self._decoder.placement.embedding
        rows = on_device(torch.stack([*embeddings]), device) if embeddings else None
        work = on_device(torch.tensor([ids]), device), *self._views(segments), rows
        decoder = self._adapters.for_texts(adapters, [segment.count for segment in segments])
        if states:
            return decoder.hidden(*work)[0]
        decoder.fill(*work)
        return None

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits fp32 (n, t, v) of hidden states (n, t, hidden)."""
        self._given = hidden
        return self._head(tuple(hidden.shape))

    @mirrored
    def _head(self, shape: tuple[int, ...]) -> torch.Tensor:
        hidden, self._given = self._given, None
        if hidden is None:
            weight = self._decoder.embedding.weight
            hidden = torch.empty(shape, dtype=weight.dtype, device=self._decoder.placement.head)
        if self._bring is not None:
            hidden = hidden.contiguous()
            self._bring(hidden)
        return self._decoder.head(hidden)

    @mirrored
    def forward(self, batch: int, count: int) -> None:
        """Run `count` tokens of each of the first slots, and store their logits."""
        self._steps.run(self._key(batch, count), batch, count)

    @mirrored
    def copy(self, source: int, target: int) -> None:
        """Copy a page."""
        for place, pages in self._copies:
            pages[0].fill_(source)
            pages[1].fill_(target)
            place.graphs.replay(("copy",), partial(place.cache.copy_here, pages))

    @mirrored
    def tables_changed(self) -> None:
        """Note that slots have other pages."""
        self._steps.tables_changed()

    @mirrored
    def warm_up(self, steps: Sequence[tuple[int, int]]) -> None:
        """Record steps of these batch sizes and tokens per slot."""
        if self._tails is not None:
            self._tails.warm_up()
        self.tables_changed()  # pages of the last step may belong to others
        for batch, count in steps:
            self._steps.make(self._key(batch, count), batch, count)

    def _views(self, segments: Sequence[Segment]) -> tuple[KvCache, RopeTables]:
        """Return the cache and the rotations for a pass over prompts."""
        views = [PromptView(place.cache, segments) for place in self._places]
        pairs = zip(self._places, views, strict=True)
        angles = [place.angles.at(view.positions) for place, view in pairs]
        if len(views) == 1:
            return views[0], angles[0]
        table = RopeTables(
            tables=tuple(one.layer(i) for i, one in enumerate(self._of_layer(angles))),
            of_layer=tuple(range(self._decoder.spec.num_layers)),
            positions=angles[0].positions,
        )
        return _LayerViews(self._of_layer(views)), table

    def _key(self, batch: int, count: int) -> Key:
        return batch, count, self._adapters.mark

    def _of_layer(self, parts: Sequence[T]) -> Iterator[T]:
        """Yield each layer's part of those of the spans."""
        for place, part in zip(self._places, parts, strict=True):
            yield from (part for _ in place.span.layers)


class _LayerViews:
    """A `KvCache` whose layers are seen by views on their own devices."""

    orders_results = False

    def __init__(self, of_layer: Iterator[PromptView]) -> None:
        self._of_layer = [*of_layer]

    def layer(self, index: int) -> LayerCache:
        return self._of_layer[index].layer(index)
