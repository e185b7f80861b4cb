"""The gated MLP's half-layer: hidden + down(activation(gate(x)) · up(x))."""

import torch

from exl2flow.kernels import Product, get_ops
from exl2flow.model.attention import LayerCache
from exl2flow.model.linear import Linear
from exl2flow.model.norms import RmsNorm
from exl2flow.model.products import product_of
from exl2flow.model.rope import RopeTable
from exl2flow.model.spec import SublayerSpec

INPUTS = ("gate_proj", "up_proj")  # what reads the normalized hidden state


class MlpSublayer:
    """A `Sublayer` that ignores positions and cache."""

    def __init__(
        self,
        spec: SublayerSpec,
        *,
        norm: RmsNorm,
        linears: dict[str, Linear],
        activation: str,
    ) -> None:
        self.spec = spec
        self.norm = norm
        self.linears = linears
        self.activation = activation

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what gate and up read, (b, t, hidden)."""
        return self.norm(hidden)

    def inner(
        self, normed: torch.Tensor, *, start: int | RopeTable = 0, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Return the gated product, (b, t, intermediate)."""
        gate, up = (self.linears[name](normed) for name in INPUTS)
        return self.gated(gate, up)

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Combine the outputs of gate and up, (b, t, intermediate) each."""
        return get_ops(gate.device).gated(gate, up, self.activation)

    def products(self) -> tuple[Product | None, Product | None]:
        """See `Sublayer.products`."""
        inputs = [self.linears[name] for name in INPUTS]
        return (
            product_of(inputs, norm=self.norm, activation=self.activation),
            product_of([self.linears["down_proj"]], adds=True),
        )

    def output(self, hidden: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """Return the next hidden state, (b, t, hidden)."""
        return hidden + self.linears["down_proj"](inner)

    def __call__(
        self, hidden: torch.Tensor, *, start: int | RopeTable = 0, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Map hidden states to the next hidden states, (b, t, hidden)."""
        return self.output(hidden, self.inner(self.normed(hidden)))
