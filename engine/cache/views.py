"""Views through which a pass reads and writes the paged cache: `StepView` and `PromptView`.

Every token sees all keys and values as they are stored, its own too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from exl2flow.engine.cache.paged import PagedCache, pages_of
from exl2flow.kernels import (
    AttentionRule,
    DeltaArgs,
    DeltaSegment,
    DeltaSlots,
    Element,
    LayerStore,
    StepCache,
    get_ops,
    on_device,
    slots_of,
)
from exl2flow.model import LayerCache, RopeTable, attend

EXACT = {Element.HALF: torch.float16, Element.FULL: torch.float32}  # stored as they are
TAIL_TOKENS = 8  # of a prompt's end, that a step reads
MOST_STEPS = 8  # for the tokens behind a cached beginning; then decoded keys and values are faster


class _Layer(NamedTuple):
    """A `LayerCache`: what a view does with one layer, `advance` if it has a state."""

    attend: Callable[..., Tensor]
    store: Callable[..., None]
    advance: Callable[..., Tensor]


class StepView:
    """View of the cache for a decode step that appends `count` tokens per sequence.

    tables: int32 (b, pages); lengths: int32 (b,), positions that each sequence holds; positions:
    int64 (b, count), of the new tokens.
    """

    orders_results = True

    def __init__(
        self, cache: PagedCache, tables: Tensor, lengths: Tensor, *, count: int = 1
    ) -> None:
        self.tables = tables
        self.lengths = lengths
        self.positions, self.slots = get_ops(tables.device).next_slots(
            tables, lengths, count, cache.page_tokens
        )
        self._cache = cache

    def layer(self, index: int) -> LayerCache:
        kept, slots = self._cache.layer(index), self.slots.flatten()
        attend, advance = partial(self.attend, kept), partial(self._advance, kept)
        return _Layer(attend, partial(_store, kept, slots), advance)

    def attend(
        self,
        store: LayerStore,
        *new: Tensor,
        table: RopeTable,
        rule: AttentionRule,
        to: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in new)
        cache = StepCache(
            store=store, tables=self.tables, lengths=self.lengths, slots=self.slots, to=to
        )
        out = get_ops(q.device).attend_step(
            q, k, v, cache, table.cos, table.sin, rule=rule, interleaved=table.interleaved
        )
        return out.transpose(1, 2)

    def _advance(
        self,
        states: DeltaSlots,
        x: Tensor,
        qkv: Tensor,
        z: Tensor,
        args: DeltaArgs,
        to: Tensor | None = None,
    ) -> Tensor:
        return get_ops(x.device).delta_step(x, qkv, z, args, states, self.lengths, to)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens `begin` to `end` of a sequence whose pages are `pages`.

    slot: where its states are, if layers have any.
    """

    pages: Sequence[int]
    begin: int
    end: int
    slot: int = 0

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.end - self.begin


_Part = tuple[Segment, int]  # a segment and the index of its first token in the pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Prompts from their start, as a batch with padding at the end of short ones.

    indexes: int64 (prompts, longest), of their tokens in the pass; unpadded: int64 (tokens,), where
    the tokens are in the flattened batch; tokens: int64 (tokens,), where they are in the pass.
    """

    indexes: Tensor
    unpadded: Tensor
    tokens: Tensor


class PromptView:
    """View of the cache for a prefill pass over chunks of several prompts, concatenated to (1, t).

    Chunk borders change only the order of sums. No two segments belong to the same sequence.
    alone: the range of a segment in the pass, and the cache slots of all positions up to its end;
    None if it begins its sequence.
    """

    orders_results = False

    def __init__(self, cache: PagedCache, segments: Sequence[Segment]) -> None:
        device = cache.device
        starts = [0, *accumulate(s.count for s in segments[:-1])]  # in the pass
        slots = [_all_slots(s, cache) for s in segments]
        positions = [torch.arange(s.begin, s.end) for s in segments]
        new = [x[s.begin :] for x, s in zip(slots, segments, strict=True)]
        self.positions, self.slots = (on_device(torch.cat(x), device) for x in (positions, new))
        parts = [*zip(segments, starts, strict=True)]
        fresh = [part for part in parts if not part[0].begin]
        longest = MOST_STEPS * TAIL_TOKENS
        tails = [part for part in parts if part[0].begin and part[0].count <= longest]
        similar = _grouped(fresh, lambda p: p[0].count.bit_length())  # in length, within a factor 2
        self.groups = [_group(parts, device) for parts in similar if len(parts) > 1]
        self.tails = [  # in order: a step reads what those before it wrote
            _tail(equal, cache)
            for begin in range(0, longest, TAIL_TOKENS)
            for equal in _grouped([*_pieces(tails, begin)], lambda p: p[0].count)
        ]
        others = [part for parts in similar if len(parts) == 1 for part in parts]
        others += [part for part in parts if part[0].begin and part[0].count > longest]
        self.alone = [(slice(start, start + s.count), _slots(s, cache)) for s, start in others]
        self._has_fresh = len(fresh) > 0
        self._cache = cache
        self._of_states = [
            DeltaSegment(slot=s.slot, begin=s.begin, start=start, count=s.count)
            for s, start in parts
        ]

    def layer(self, index: int) -> LayerCache:
        kept = self._cache.layer(index)
        attend, advance = partial(self.attend, kept), partial(self._advance, kept)
        return _Layer(attend, partial(_store, kept, self.slots), advance)

    def _advance(
        self, states: DeltaSlots, x: Tensor, qkv: Tensor, z: Tensor, args: DeltaArgs
    ) -> Tensor:
        return get_ops(x.device).delta_scan(x, qkv, z, args, states, self._of_states)

    def attend(
        self, store: LayerStore, *new: Tensor, table: RopeTable, rule: AttentionRule
    ) -> Tensor:
        (q, k, v), ops = new, get_ops(new[0].device)
        is_whole = len(self.alone) == 1 and not self.groups and not self.tails
        out = q if is_whole else torch.empty_like(q)
        for indexes, step in self.tails:
            qkv = (x[0].transpose(0, 1)[indexes].transpose(1, 2) for x in new)
            attended = step.attend(store, *qkv, table=table.at(indexes), rule=rule)
            out[0].transpose(0, 1)[indexes] = attended.transpose(1, 2)
        if not self.groups and not self.alone:
            return out
        q, k = table.rotate(q), table.rotate(k)
        ops.write_cache(store, self.slots, *(x[0].transpose(0, 1) for x in (k, v)))
        stored = {EXACT.get(x.element) for x in (store.keys, store.values)}
        if self._has_fresh and stored != {q.dtype}:
            k, v = (_heads(x, q) for x in ops.read_cache(store, self.slots))
        for group in self.groups:
            queries, keys, values = (x[0][:, group.indexes].transpose(0, 1) for x in (q, k, v))
            attended = attend(queries, keys, values, rule)  # (prompts, heads, longest, head_dim)
            attended = attended.transpose(0, 1).flatten(1, 2)
            out[0].index_copy_(1, group.tokens, attended.index_select(1, group.unpadded))
        for tokens, slots in self.alone:
            if slots is None:
                keys, values = k[:, :, tokens], v[:, :, tokens]
            else:
                keys, values = (_heads(x, q) for x in ops.read_cache(store, slots))
            attended = attend(q[:, :, tokens], keys, values, rule)
            if is_whole:
                return attended
            out[:, :, tokens] = attended
        return out


def _store(store: LayerStore, slots: Tensor, k: Tensor, v: Tensor, *, table: RopeTable) -> None:
    """Rotate and store keys and values (b, kv_heads, t, head_dim) at slots int64 (b · t,)."""
    new = (x.transpose(1, 2).flatten(0, 1) for x in (table.rotate(k), v))
    get_ops(k.device).write_cache(store, slots, *new)


def _slots(segment: Segment, cache: PagedCache) -> Tensor | slice | None:
    """Return the slots of all positions up to the end, or None if the segment begins a sequence.

    A slice if pages follow each other and hold what attention reads, which is then not copied.
    """
    if not segment.begin:
        return None
    first, *others = segment.pages[: pages_of(segment.end, cache.page_tokens)]
    is_exact = EXACT.keys() >= {cache.form.keys, cache.form.values}
    if is_exact and all(page == first + i for i, page in enumerate(others, 1)):
        begin = first * cache.page_tokens
        return slice(begin, begin + segment.end)
    return on_device(_all_slots(segment, cache), cache.device)


def _all_slots(segment: Segment, cache: PagedCache) -> Tensor:
    """Return the slots of all positions up to a segment's end, int64 (t,)."""
    pages = torch.tensor(segment.pages, dtype=torch.int32)
    return slots_of(pages, 0, segment.end, cache.page_tokens)


def _grouped(parts: Sequence[_Part], key: Callable[[_Part], int]) -> list[list[_Part]]:
    return [list(group) for _, group in groupby(sorted(parts, key=key), key=key)]


def _pieces(parts: Sequence[_Part], begin: int) -> Iterator[_Part]:
    """Yield up to `TAIL_TOKENS` tokens of each segment from its token `begin` on."""
    for segment, start in parts:
        if begin < segment.count:
            first = segment.begin + begin
            end = min(first + TAIL_TOKENS, segment.end)
            yield replace(segment, begin=first, end=end), start + begin


def _group(parts: Sequence[_Part], device: torch.device) -> _Group:
    counts = torch.tensor([s.count for s, _ in parts])[:, None]
    steps = torch.arange(int(counts.max()))
    indexes = torch.tensor([start for _, start in parts])[:, None] + steps.clamp(max=counts - 1)
    is_token = (steps < counts).flatten()
    return _Group(
        indexes=on_device(indexes, device),
        unpadded=on_device(is_token.nonzero()[:, 0], device),
        tokens=on_device(indexes.flatten()[is_token], device),
    )


def _tail(parts: Sequence[_Part], cache: PagedCache) -> tuple[Tensor, StepView]:
    """Return the indexes of segments of equal length in the pass, and a view that appends them."""
    tables = pad_sequence([torch.tensor(s.pages, dtype=torch.int32) for s, _ in parts], True)
    lengths = torch.tensor([s.begin for s, _ in parts], dtype=torch.int32)
    tables, lengths = (on_device(x, cache.device) for x in (tables, lengths))
    view = StepView(cache, tables, lengths, count=parts[0][0].count)
    return _group(parts, cache.device).indexes, view


def _heads(x: Tensor, like: Tensor) -> Tensor:
    return x.transpose(0, 1)[None].to(like.dtype)
