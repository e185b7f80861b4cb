"""What a pass of the model sees of a paged cache: `StepView` and `PromptView`.

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

from exl2flow.inference.cache.paged import PagedCache, pages_of
from exl2flow.kernels import (
    PAGE_TOKENS,
    STEP_TOKENS,
    AttentionRule,
    Element,
    LayerStore,
    StepCache,
    get_ops,
    on_device,
    slots_at,
    slots_of,
)
from exl2flow.model import LayerCache, RopeTable, attend

EXACT = {Element.HALF: torch.float16, Element.FULL: torch.float32}  # stored as they are
MOST_STEPS = 8  # for the tokens behind a cached beginning; then decoded keys and values are faster


class _Layer(NamedTuple):
    """A `LayerCache`: a view's `attend` and `store` for one layer."""

    attend: Callable[..., Tensor]
    store: Callable[..., None]


class StepView:
    """View of the cache for a decode step that appends `count` tokens per sequence.

    tables: int32 (b, pages); lengths: int32 (b,), positions that each sequence holds; positions:
    int64 (b, count), of the new tokens.
    """

    def __init__(
        self, cache: PagedCache, tables: Tensor, lengths: Tensor, *, count: int = 1
    ) -> None:
        self.tables = tables
        self.lengths = lengths
        self.positions = lengths.long()[:, None]
        if count > 1:
            self.positions = self.positions + torch.arange(count, device=lengths.device)
        self.slots = slots_at(tables, self.positions)
        self._stores = cache.stores

    def layer(self, index: int) -> LayerCache:
        store = self._stores[index]
        return _Layer(partial(self.attend, store), partial(_store, store, self.slots.flatten()))

    def attend(
        self, store: LayerStore, *new: Tensor, table: RopeTable, rule: AttentionRule
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in new)
        cache = StepCache(store=store, tables=self.tables, lengths=self.lengths, slots=self.slots)
        found = get_ops(q.device).attend_step(
            q, k, v, cache, table.cos, table.sin, rule=rule, interleaved=table.interleaved
        )
        return found.transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens `begin` to `end` of a sequence whose pages are `pages`."""

    pages: Sequence[int]
    begin: int
    end: int

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.end - self.begin


_Part = tuple[Segment, int]  # and the place of its first token in the pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Prompts from their start, side by side, short ones padded at their end.

    rows: int64 (prompts, longest), places of their tokens in the pass; kept: int64 (tokens,), where
    the tokens are in the flattened group; places: int64 (tokens,), where they belong in the pass.
    """

    rows: Tensor
    kept: Tensor
    places: Tensor


class PromptView:
    """The cache as a pass over parts of several prompts sees it, (1, t) tokens one after another.

    Where prompts are cut changes only the order of sums. No two parts belong to the same sequence.
    alone: the place of a part in the pass, and the slots of all positions up to its end; None if it
    begins its sequence.
    """

    def __init__(self, cache: PagedCache, segments: Sequence[Segment]) -> None:
        device = cache.device
        starts = [0, *accumulate(s.count for s in segments[:-1])]  # places in the pass
        slots = [slots_of(torch.tensor(s.pages, dtype=torch.int32), 0, s.end) for s in segments]
        positions = [torch.arange(s.begin, s.end) for s in segments]
        new = [x[s.begin :] for x, s in zip(slots, segments, strict=True)]
        self.positions, self.slots = (on_device(torch.cat(x), device) for x in (positions, new))
        parts = [*zip(segments, starts, strict=True)]
        fresh = [part for part in parts if not part[0].begin]
        most = MOST_STEPS * STEP_TOKENS
        tails = [part for part in parts if part[0].begin and part[0].count <= most]
        alike = _grouped(fresh, lambda p: p[0].count.bit_length())
        # in each the longest is less than twice as long as the shortest
        self.groups = [_group(parts, device) for parts in alike if len(parts) > 1]
        self.tails = [  # in order: a step reads what those before it wrote
            _tail(alike, cache)
            for begin in range(0, most, STEP_TOKENS)
            for alike in _grouped([*_pieces(tails, begin)], lambda p: p[0].count)
        ]
        others = [part for parts in alike if len(parts) == 1 for part in parts]
        others += [part for part in parts if part[0].begin and part[0].count > most]
        self.alone = [(slice(start, start + s.count), _slots(s, cache)) for s, start in others]
        self._has_fresh = len(fresh) > 0
        self._stores = cache.stores

    def layer(self, index: int) -> LayerCache:
        store = self._stores[index]
        return _Layer(partial(self.attend, store), partial(_store, store, self.slots))

    def attend(
        self, store: LayerStore, *new: Tensor, table: RopeTable, rule: AttentionRule
    ) -> Tensor:
        (q, k, v), ops = new, get_ops(new[0].device)
        is_whole = len(self.alone) == 1 and not self.groups and not self.tails
        out = q if is_whole else torch.empty_like(q)
        for rows, step in self.tails:
            mine = (x[0].transpose(0, 1)[rows].transpose(1, 2) for x in new)
            found = step.attend(store, *mine, table=table.at(rows), rule=rule)
            out[0].transpose(0, 1)[rows] = found.transpose(1, 2)
        if not self.groups and not self.alone:
            return out
        q, k = table.rotate(q), table.rotate(k)
        ops.write_cache(store, self.slots, *(x[0].transpose(0, 1) for x in (k, v)))
        stored = {EXACT.get(x.element) for x in (store.keys, store.values)}
        if self._has_fresh and stored != {q.dtype}:
            k, v = (_heads(x, q) for x in ops.read_cache(store, self.slots))
        for group in self.groups:
            queries, *held = (x[0][:, group.rows].transpose(0, 1) for x in (q, k, v))
            found = attend(queries, held[0], held[1], rule)  # (prompts, heads, longest, head_dim)
            found = found.transpose(0, 1).flatten(1, 2)
            out[0].index_copy_(1, group.places, found.index_select(1, group.kept))
        for place, slots in self.alone:
            if slots is None:
                held = [k[:, :, place], v[:, :, place]]
            else:
                held = [_heads(x, q) for x in ops.read_cache(store, slots)]
            found = attend(q[:, :, place], held[0], held[1], rule)
            if is_whole:
                return found
            out[:, :, place] = found
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
    first, *others = segment.pages[: pages_of(segment.end)]
    is_exact = EXACT.keys() >= {cache.form.keys, cache.form.values}
    if is_exact and all(page == first + i for i, page in enumerate(others, 1)):
        return slice(first * PAGE_TOKENS, first * PAGE_TOKENS + segment.end)
    found = slots_of(torch.tensor(segment.pages, dtype=torch.int32), 0, segment.end)
    return on_device(found, cache.device)


def _grouped(parts: Sequence[_Part], key: Callable[[_Part], int]) -> list[list[_Part]]:
    return [list(alike) for _, alike in groupby(sorted(parts, key=key), key=key)]


def _pieces(parts: Sequence[_Part], begin: int) -> Iterator[_Part]:
    """Yield the step of each part that begins there, if it is as long."""
    for segment, start in parts:
        if begin < segment.count:
            first = segment.begin + begin
            end = min(first + STEP_TOKENS, segment.end)
            yield replace(segment, begin=first, end=end), start + begin


def _group(parts: Sequence[_Part], device: torch.device) -> _Group:
    counts = torch.tensor([s.count for s, _ in parts])[:, None]
    steps = torch.arange(int(counts.max()))
    rows = torch.tensor([start for _, start in parts])[:, None] + steps.clamp(max=counts - 1)
    is_kept = (steps < counts).flatten()
    return _Group(
        rows=on_device(rows, device),
        kept=on_device(is_kept.nonzero()[:, 0], device),
        places=on_device(rows.flatten()[is_kept], device),
    )


def _tail(parts: Sequence[_Part], cache: PagedCache) -> tuple[Tensor, StepView]:
    """Return the places of parts of equal length in the pass, and a step that adds them."""
    tables = pad_sequence([torch.tensor(s.pages, dtype=torch.int32) for s, _ in parts], True)
    lengths = torch.tensor([s.begin for s, _ in parts], dtype=torch.int32)
    there = (on_device(x, cache.device) for x in (tables, lengths))
    return _group(parts, cache.device).rows, StepView(cache, *there, count=parts[0][0].count)


def _heads(x: Tensor, like: Tensor) -> Tensor:
    return x.transpose(0, 1)[None].to(like.dtype)
