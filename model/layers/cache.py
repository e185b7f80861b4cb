"""The part of a cache that layers need: keys, values and states."""

from typing import Protocol

import torch

from exl2flow.kernels import AttentionRule, DeltaArgs
from exl2flow.model.layers.rope import RopeTable


class LayerCache(Protocol):
    """KV cache of one layer; new keys and values are appended. Or states, of a layer with those."""

    def advance(
        self,
        x: torch.Tensor,
        qkv: torch.Tensor,
        z: torch.Tensor,
        args: DeltaArgs,
        to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Change the states by new tokens; return what `Ops.gated_delta` returns for them.

        to: as in `attend`.
        """
        ...

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        table: RopeTable,
        rule: AttentionRule,
        to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add keys and values, then attend to all of them; see `attend`.

        Args:
            q: queries (b, heads, t, head_dim), before rotation.
            k: keys of the same tokens (b, kv_heads, t, head_dim), before rotation.
            v: values, shaped as the keys.
            table: how queries and keys are rotated.
            rule: what happens to the scores.
            to: where the elements of a token's result go, see `StepCache`; None: in order. Only
                of a `KvCache` that `orders_results`.
        """
        ...

    def store(self, k: torch.Tensor, v: torch.Tensor, *, table: RopeTable) -> None:
        """Add keys and values; arguments as in `attend`."""
        ...


class KvCache(Protocol):
    """One `LayerCache` per layer; orders_results: whether `attend` and `advance` take `to`."""

    orders_results: bool

    def layer(self, index: int) -> LayerCache: ...
