"""Layers with a gated delta rule, with random tensors."""

from collections.abc import Callable

import torch

from exl2flow.kernels import DeltaArgs


def delta_layer(
    drawn: Callable[..., torch.Tensor], *, key_heads: int, value_heads: int, dim: int, hidden: int
) -> DeltaArgs:
    """Return a layer; `drawn` makes normally distributed tensors of a shape."""
    return DeltaArgs(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=dim,
        value_dim=dim,
        conv=drawn((2 * key_heads + value_heads) * dim, 4) / 2,
        decay=-drawn(value_heads).exp(),
        step=drawn(value_heads),
        maps=drawn(2 * value_heads, hidden) * hidden**-0.5,
        norm=1 + 0.1 * drawn(dim),
        eps=1e-6,
    )
