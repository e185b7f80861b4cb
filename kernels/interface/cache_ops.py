"""The key-value cache operations of `Ops`."""

from typing import Protocol

import torch

from exl2flow.kernels.interface.attention_rule import AttentionRule
from exl2flow.kernels.interface.cache_formats import LayerStore

STEP_TOKENS = 8  # most new tokens of a sequence for which kernels attend


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
        self, store: LayerStore, slots: torch.Tensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values at slots int64 (t,), each fp16 (t, kv_heads, head_dim).

        Those of a slice that are stored as they are returned are not copied.
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
        rule: AttentionRule,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Rotate and store new tokens; each attends to all up to itself, as the cache holds them.

        Args:
            q: queries (b, t, heads, head_dim) before rotation; kernels take up to `STEP_TOKENS`.
            k: keys (b, t, kv_heads, head_dim) before rotation.
            v: values, of the same shape as the keys.
            store: the cache of one layer.
            tables: int32 (b, pages), each sequence's pages in order.
            lengths: int32 (b,), stored positions of each sequence before the new tokens.
            slots: int64 (b, t), those of the new positions. Duplicates, as idle rows have them on a
                spare page, hold any of their tokens afterwards.
            cos: of the new positions, without any columns too; see `Ops.rotate`.
            sin: of the same shape.
            rule: what happens to the scores.
            interleaved: the pairs to rotate are neighbours; see `halved`.

        Returns:
            (b, t, heads, head_dim) in the dtype of q.
        """
        ...
