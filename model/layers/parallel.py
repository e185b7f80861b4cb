"""Attention and MLP side by side: hidden + o(attention of x) + down(MLP of x), x normed once."""

import torch

from exl2flow.model.layers.attention import AttentionSublayer, Projected
from exl2flow.model.layers.cache import LayerCache
from exl2flow.model.layers.fuse import Products, product_of
from exl2flow.model.layers.mlp import MlpSublayer, activated
from exl2flow.model.layers.rope import RopeTable
from exl2flow.model.layers.sublayer import Sublayer


class ParallelSublayer(Sublayer):
    """A `Sublayer` of two others, which share its spec, norms and linears."""

    def __init__(self, attention: AttentionSublayer, mlp: MlpSublayer) -> None:
        super().__init__(
            attention.spec,
            norms=attention.norms,
            linears=attention.linears,
            multiplier=attention.multiplier,
        )
        self.attention = attention
        self.mlp = mlp

    def reads(
        self, hidden: torch.Tensor, *, start: int | RopeTable = 0, cache: LayerCache | None = None
    ) -> dict[str, torch.Tensor]:
        """Return what the first projections read, what o reads, and what down reads."""
        first, of_attention = self.attention.captures
        x = self.normed("before", hidden)
        q, k, v, *others = self.apply_linears(first, x)
        projected = Projected(q=q, k=k, v=v)
        return {
            first: x,
            of_attention: self.attention.attend(projected, start=start, cache=cache),
            self.mlp.captures[1]: activated(others, self.mlp.activation),
        }

    def fill(self, hidden: torch.Tensor, *, start: int | RopeTable, cache: LayerCache) -> None:
        """See `AttentionSublayer.fill`."""
        q, k, v, *_ = self.apply_linears(self.attention.captures[0], self.normed("before", hidden))
        self.attention.store(Projected(q=q, k=k, v=v), start=start, cache=cache)

    def products(self) -> Products:
        """See `Sublayer.products`."""
        if self.together or "after" in self.norms:  # a norm of both parts' sum is not a product's
            return (None,)
        first = product_of(
            self.with_roles("gate", "up"),
            beside=self.with_roles("q", "k", "v"),
            norm=self.norms.get("before"),
            activation=self.mlp.activation,
        )
        return first, self.residual_product("down"), self.residual_product("o")
