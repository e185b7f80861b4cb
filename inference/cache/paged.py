"""Keys and values in pages of 256 tokens, in any format of `CACHE_FORMATS`."""

from collections.abc import Iterator

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.inference.cache.layered import CountedLayer, LayeredCache
from exl2flow.kernels import (
    CACHE_FORMATS,
    PAGE_TOKENS,
    CacheFormat,
    LayerStore,
    get_ops,
    slots_at,
)
from exl2flow.model import ModelSpec, RopeTable, attend


class Places:
    """Where all layers read and write: pages, and positions filled, on the device."""

    def __init__(self, tables: torch.Tensor) -> None:
        self.tables = tables  # int32 (b, pages)
        self.lengths = torch.zeros(len(tables), dtype=torch.int32, device=tables.device)
        self.slots = self.next_slots()
        self._stands_at = 0
        self._between: dict[tuple[int, int], torch.Tensor] = {}

    def stand_at(self, length: int) -> None:
        """Set lengths and slots for the next token of every sequence, once for all layers."""
        if length != self._stands_at:
            self.lengths.fill_(length)
            self.slots, self._stands_at = self.next_slots(), length

    def forget(self) -> None:
        """Mark lengths and slots as stale, because a recording changed them."""
        self._stands_at = -1

    def slots_between(self, begin: int, end: int) -> torch.Tensor:
        """Return the slots of positions `begin` to `end` of each sequence, int64 (b, t)."""
        if (begin, end) not in self._between:
            if len(self._between) > 1:  # all layers need the stored ones and the new ones
                self._between.clear()
            positions = torch.arange(begin, end, device=self.tables.device)
            positions = positions.expand(len(self.tables), -1)
            self._between[begin, end] = slots_at(self.tables, positions)
        return self._between[begin, end]

    def next_slots(self) -> torch.Tensor:
        """Return the slot of the next position of each sequence, int64 (b,)."""
        return slots_at(self.tables, self.lengths.long()[:, None])[:, 0]


class PagedLayer(CountedLayer):
    """Keys and values of one layer, for sequences of equal length.

    Tokens of one call see each other unquantized, earlier ones as stored.
    """

    def __init__(self, store: LayerStore, places: Places, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self.store = store
        self.places = places
        self._ops = get_ops(places.tables.device)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: RopeTable,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        if k.shape[-2] > 1:
            return self._prefill(table.rotate(q), table.rotate(k), v, scale, window)
        places = self.places
        places.stand_at(self.length)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found = self._ops.attend_step(
            q, k, v, self.store, places.tables, places.lengths, places.slots, table.cos, table.sin,
            scale=scale, window=window,
        )  # fmt: skip
        return found.transpose(1, 2)

    def _prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Attend with many tokens to a copy of the stored ones and to themselves."""
        slots = self.places.slots_between(self.length, self.length + k.shape[-2])
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (k, v)]  # (b · t, kv_heads, head_dim)
        self._ops.write_cache(self.store, slots.flatten(), *rows)
        if self.length:
            k, v = self._behind_held(k, v)
        return attend(q, k, v, scale=scale, window=window)

    def _behind_held(self, *new: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield keys and values (b, kv_heads, length + t, head_dim): stored ones, then new ones."""
        slots = self.places.slots_between(0, self.length + new[0].shape[-2])
        found = self._ops.read_cache(self.store, slots.flatten())  # with room for the new ones
        for x, own in zip(found, new, strict=True):
            both = x.view(*slots.shape, *x.shape[1:]).transpose(1, 2).to(own.dtype)
            both[:, :, self.length :] = own
            yield both


class PagedCache(LayeredCache[PagedLayer]):
    """A cache for `batch` sequences of equal length, each with its own pages."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        batch: int,
        max_tokens: int,
        form: CacheFormat,
        device: torch.device | str,
    ) -> None:
        pages = -(-max_tokens // PAGE_TOKENS)
        tables = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
        attention, self.places = spec.attention, Places(tables)
        layers = (
            PagedLayer(
                LayerStore.empty(
                    form,
                    pages=batch * pages,
                    kv_heads=attention.num_kv_heads,
                    head_dim=attention.head_dim,
                    device=device,
                ),
                self.places,
                max_tokens,
            )
            for _ in range(spec.num_layers)
        )
        super().__init__(layers, max_tokens=max_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values occupy."""
        return sum(layer.store.nbytes for layer in self.layers)


def cache_format(name: str) -> CacheFormat:
    """Return a format by its name.

    Raises:
        ConfigError: there is no format of that name.
    """
    if name not in CACHE_FORMATS:
        raise ConfigError(f"no cache format `{name}`; choose one of {', '.join(CACHE_FORMATS)}")
    return CACHE_FORMATS[name]
