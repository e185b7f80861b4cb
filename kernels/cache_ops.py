"""The operations of a cache of keys and values, a part of `Ops`."""

from typing import Protocol

import torch

from exl2flow.kernels.cache_formats import LayerStore


class CacheOps(Protocol):
    """What a cache stores, and attention to it; `docs/concepts/cache.md` has the formats."""

    def write_cache(
        self, store: LayerStore, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store keys and values in the form of the cache.

        Args:
            store: of one layer.
            slots: int64 (t,), where to, each once.
            k: keys after rotation, (t, kv_heads, head_dim), rounded to fp16.
            v: values, shaped likewise.
        """
        ...

    def read_cache(
        self, store: LayerStore, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of slots int64 (t,), fp16 (t, kv_heads, head_dim) each."""
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
        """Attend causally to what a cache holds, and to new tokens as they are.

        Args:
            q: queries of the new tokens (b, t, heads, head_dim), rotated.
            k: their keys (b, t, kv_heads, head_dim), rotated; the cache need not hold them.
            v: their values, shaped as the keys.
            store: of one layer.
            tables: int32 (b, pages), each sequence's pages in order.
            lengths: int32 (b,), positions that the cache holds of each before the new ones.
            scale: multiplies the scores.
            window: how many positions, its own included, a query sees; None for all.
            softcap: scores s become `softcap · tanh(s / softcap)`; None: they stay.

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
        """Rotate, store and attend, one new token for each sequence; see `paged_attention`.

        Args:
            q: queries (b, 1, heads, head_dim) before rotation.
            k: keys (b, 1, kv_heads, head_dim) before rotation.
            v: values, shaped as the keys.
            store: of one layer.
            tables: int32 (b, pages).
            lengths: int32 (b,).
            slots: int64 (b,), where keys and values of the new tokens go.
            cos: as of `rotate`.
            sin: shaped likewise.
            scale: multiplies the scores.
            window: as of `paged_attention`.
            softcap: likewise.

        Returns:
            (b, 1, heads, head_dim) in the dtype of q.
        """
        ...
