"""Keys and values in pages of 256 tokens, in any format of `CACHE_FORMATS`.

Sequences share one pool of pages; `pages.py` decides which page holds what. A pass of the model
reads and writes through a view: `StepView` for one new token per sequence, `PromptView` for many
tokens of several prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.inference.cache.pages import Copy
from exl2flow.kernels import (
    CACHE_FORMATS,
    PAGE_TOKENS,
    CacheFormat,
    Element,
    LayerStore,
    get_ops,
    on_device,
    slots_at,
    slots_of,
)
from exl2flow.model import ModelSpec, RopeTable, attend

EXACT = {Element.HALF: torch.float16, Element.FULL: torch.float32}  # stored as they are


class PagedCache:
    """Keys and values of all layers.

    pages: usable pages; one more, `spare`, takes what idle slots write.
    """

    def __init__(
        self, spec: ModelSpec, *, pages: int, form: CacheFormat, device: torch.device | str
    ) -> None:
        self.pages = self.spare = pages
        self.form = form
        self.device = torch.device(device)
        attention = spec.attention
        self.stores = [
            LayerStore.empty(
                form,
                pages=pages + 1,
                kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
                device=device,
            )
            for _ in range(spec.num_layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values occupy."""
        return sum(store.nbytes for store in self.stores)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy pages, all rows of them."""
        if not copies:
            return
        source, target = (
            on_device(torch.tensor(pages), self.device)
            for pages in ([c.source for c in copies], [c.target for c in copies])
        )
        for store in self.stores:
            store.keys.copy_pages(source, target)
            store.values.copy_pages(source, target)


class StepView:
    """The cache as a step sees it that adds one token to each sequence.

    tables: int32 (b, pages); lengths: int32 (b,), positions that each sequence holds.
    """

    def __init__(self, cache: PagedCache, tables: torch.Tensor, lengths: torch.Tensor) -> None:
        self.tables = tables
        self.lengths = lengths
        self.slots = slots_at(tables, lengths.long()[:, None])[:, 0]
        self.layers = [_StepLayer(store, self) for store in cache.stores]


class _StepLayer:
    def __init__(self, store: LayerStore, view: StepView) -> None:
        self._store = store
        self._view = view

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        table: RopeTable,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """See `LayerCache`."""
        view = self._view
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found = get_ops(q.device).attend_step(
            q, k, v, self._store, view.tables, view.lengths, view.slots, table.cos, table.sin,
            scale=scale, window=window,
        )  # fmt: skip
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Prompts from their start, side by side, short ones padded at their end.

    rows: int64 (prompts, longest), places of their tokens in the pass; kept: int64 (tokens,), where
    the tokens are in the flattened group; places: int64 (tokens,), where they belong in the pass.
    """

    rows: torch.Tensor
    kept: torch.Tensor
    places: torch.Tensor


class PromptView:
    """The cache as a pass over parts of several prompts sees it, (1, t) tokens one after another.

    Every token sees earlier ones as they are stored, so where prompts are cut changes nothing.
    """

    def __init__(self, cache: PagedCache, segments: Sequence[Segment]) -> None:
        device = cache.device
        starts = [0, *accumulate(s.count for s in segments[:-1])]
        slots = [slots_of(torch.tensor(s.pages, dtype=torch.int32), 0, s.end) for s in segments]
        positions = torch.cat([torch.arange(s.begin, s.end) for s in segments])
        self.positions = on_device(positions, device)
        new = [x[s.begin :] for x, s in zip(slots, segments, strict=True)]
        self.slots = on_device(torch.cat(new), device)
        fresh = [(s.count, start) for s, start in zip(segments, starts, strict=True) if not s.begin]
        fresh.sort(key=lambda pair: pair[0].bit_length())  # within a group twice as long at most
        self.groups = [
            _group(list(members), device)
            for _, members in groupby(fresh, key=lambda pair: pair[0].bit_length())
        ]
        self.behind = [  # place in the pass, and slots of all positions up to the end
            (slice(start, start + s.count), on_device(x, device))
            for x, s, start in zip(slots, segments, starts, strict=True)
            if s.begin
        ]
        self.layers = [_PromptLayer(store, self) for store in cache.stores]


def _group(members: list[tuple[int, int]], device: torch.device) -> _Group:
    """Build from (tokens, place of the first in the pass) of each prompt."""
    longest = max(count for count, _ in members)
    steps = torch.arange(longest)
    counts = torch.tensor([count for count, _ in members])[:, None]
    rows = torch.tensor([start for _, start in members])[:, None] + steps.clamp(max=counts - 1)
    is_kept = (steps < counts).flatten()
    return _Group(
        rows=on_device(rows, device),
        kept=on_device(is_kept.nonzero()[:, 0], device),
        places=on_device(rows.flatten()[is_kept], device),
    )


class _PromptLayer:
    def __init__(self, store: LayerStore, view: PromptView) -> None:
        self._store = store
        self._view = view

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        table: RopeTable,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """See `LayerCache`."""
        view, ops = self._view, get_ops(q.device)
        q, k = table.rotate(q), table.rotate(k)
        rows = [x[0].transpose(0, 1) for x in (k, v)]  # (t, kv_heads, head_dim)
        ops.write_cache(self._store, view.slots, *rows)
        stored = {EXACT.get(x.element) for x in (self._store.keys, self._store.values)}
        if view.groups and stored != {q.dtype}:
            k, v = (self._heads(x, q) for x in ops.read_cache(self._store, view.slots))
        out = torch.empty_like(q)
        for group in view.groups:
            mine = (x[0][:, group.rows].transpose(0, 1) for x in (q, k, v))
            found = attend(*mine, scale=scale, window=window)  # (prompts, heads, longest, head_dim)
            found = found.transpose(0, 1).flatten(1, 2)
            out[0].index_copy_(1, group.places, found.index_select(1, group.kept))
        for place, slots in view.behind:
            held = (self._heads(x, q) for x in ops.read_cache(self._store, slots))
            out[:, :, place] = attend(q[:, :, place], *held, scale=scale, window=window)
        return out

    @staticmethod
    def _heads(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)[None].to(like.dtype)


def cache_format(name: str, device: torch.device) -> CacheFormat:
    """Return a format by its name.

    Raises:
        ConfigError: there is no format of that name on the device.
    """
    names = [n for n in CACHE_FORMATS if n != "fp32" or device.type == "cpu"]
    if name not in names:
        raise ConfigError(f"no cache format `{name}`; choose one of {', '.join(names)}")
    return CACHE_FORMATS[name]


def pages_of(tokens: int) -> int:
    """Return how many pages hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)
