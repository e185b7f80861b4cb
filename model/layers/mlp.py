"""The MLP's half-layer: hidden + down(activation(gate(x)) · up(x)), or down(activation(up(x)))."""

from collections.abc import Sequence

import torch

from exl2flow.kernels import get_ops
from exl2flow.model.config.sublayer_spec import SublayerSpec
from exl2flow.model.layers.cache import LayerCache
from exl2flow.model.layers.fuse import Products, product_of
from exl2flow.model.layers.linear import Linear
from exl2flow.model.layers.norms import Norm
from exl2flow.model.layers.rope import RopeTable
from exl2flow.model.layers.sublayer import Sublayer


class MlpSublayer(Sublayer):
    """A `Sublayer` that ignores positions and cache."""

    def __init__(
        self,
        spec: SublayerSpec,
        *,
        norms: dict[str, Norm],
        linears: dict[str, Linear],
        activation: str,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__(spec, norms=norms, linears=linears, multiplier=multiplier)
        self.activation = activation
        self.captures = spec.projection("up").capture, spec.projection("down").capture

    def reads(
        self, hidden: torch.Tensor, *, start: int | RopeTable = 0, cache: LayerCache | None = None
    ) -> dict[str, torch.Tensor]:
        """Return what gate and up read, and the product that down reads."""
        first, last = self.captures
        x = self.normed("before", hidden)
        return {first: x, last: activated(self.apply_linears(first, x), self.activation)}

    def products(self) -> Products:
        """See `Sublayer.products`."""
        norm, linears = self.norms.get("before"), self.with_roles("gate", "up")
        first = product_of(linears, norm=norm, activation=self.activation)
        return first, self.residual_product("down")


def activated(outputs: Sequence[torch.Tensor], activation: str) -> torch.Tensor:
    """Return what down reads from the outputs of gate, if there is one, and up, (…, width)."""
    first, *up = outputs
    ops = get_ops(first.device)
    if not up:
        return ops.activated(first, activation)
    return ops.gated(first, up[0], activation)
