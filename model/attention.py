"""Attention over grouped heads, with or without a cache of earlier keys and values."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention


class LayerCache(Protocol):
    """Keys and values of one layer; those handed in follow those held."""

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take (b, kv_heads, t, head_dim) each and return all that are held, the new ones last."""
        ...


class KvCache(Protocol):
    """One `LayerCache` per layer, and the number of positions that all of them hold."""

    @property
    def layers(self) -> Sequence[LayerCache]: ...

    @property
    def length(self) -> int: ...


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None
) -> torch.Tensor:
    """Attend causally; the last query stands at the position of the last key.

    Args:
        q: queries (b, heads, t, head_dim).
        k: keys (b, kv_heads, positions, head_dim), `positions` at least `t`.
        v: values, shaped as the keys.
        scale: multiplies the scores.
        window: how many positions, its own included, a query sees; None for all.

    Returns:
        (b, heads, t, head_dim).
    """
    count, positions = q.shape[-2], k.shape[-2]
    is_windowed = window is not None and positions > window
    is_causal = count == positions and not is_windowed
    mask = None
    if not is_causal and (count > 1 or is_windowed):
        mask = _visible(count, positions, window, q.device)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True
    )


def _visible(count: int, positions: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return which keys each of the last `count` positions sees, bool (t, positions)."""
    query = torch.arange(positions - count, positions, device=device)[:, None]
    key = torch.arange(positions, device=device)[None, :]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)
