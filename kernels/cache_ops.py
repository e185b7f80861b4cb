"""The key-value cache operations of `Ops`."""

from typing import Protocol

import torch

from exl2flow.kernels.cache_formats import LayerStore


class CacheOps(Protocol):
    """Storing to a cache, and attending to it; `docs/concepts/cache.md` defines the formats."""

    def write_cache(
        self, store: LayerStore, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store keys and values in the format of the cache.

        Args:
            store: the cache of one layer.
            slots: int64 (t,), the destinations, without duplicates.
            k: rotated keys (t, kv_heads, head_dim), rounded to fp16 here.
            v: values of the same shape.
        """
        ...

    def read_cache(
        self, store: LayerStore, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values at slots int64 (t,), each fp16 (t, kv_heads, head_dim)."""
        ...

    def paged_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        store: LayerStore,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Attend causally to the cached tokens, and to the new tokens unquantized.

        Args:
            q: queries of the new tokens (b, t, heads, head_dim), rotated.
            k: their keys (b, t, kv_heads, head_dim), rotated; the cache need not hold them.
            v: their values, of the same shape as the keys.
            store: the cache of one layer.
            tables: int32 (b, pages), each sequence's pages in order.
            lengths: int32 (b,), cached positions of each sequence before the new tokens.
            scale: multiplies the scores.
            window: number of positions a query sees, its own included; None: all.
            softcap: scores s become `softcap · tanh(s / softcap)`; None: unchanged.

        Returns:
            (b, t, heads, head_dim) in the dtype of q.
        """
        ...

    def attend_step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        store: LayerStore,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Rotate, store and attend for one new token per sequence; see `paged_attention`.

        Args:
            q: queries (b, 1, heads, head_dim) before rotation.
            k: keys (b, 1, kv_heads, head_dim) before rotation.
            v: values, of the same shape as the keys.
            store: the cache of one layer.
            tables: int32 (b, pages).
            lengths: int32 (b,).
            slots: int64 (b,), where the new keys and values are stored.
            cos: see `Ops.rotate`.
            sin: of the same shape.
            scale: multiplies the scores.
            window: see `paged_attention`.
            softcap: see `paged_attention`.

        Returns:
            (b, 1, heads, head_dim) in the dtype of q.
        """
        ...
