"""Layers with a state: the gated delta rule as a sublayer."""

from collections.abc import Sequence

import torch

from exl2flow.core.errors import NonFiniteState
from exl2flow.kernels import DeltaArgs, get_ops
from exl2flow.model.config.delta_spec import DeltaSpec
from exl2flow.model.config.sublayer_spec import SublayerSpec
from exl2flow.model.files.weights import TensorFiles
from exl2flow.model.layers.cache import LayerCache
from exl2flow.model.layers.fuse import Products, product_of
from exl2flow.model.layers.linear import Linear, read_shaped
from exl2flow.model.layers.norms import Norm
from exl2flow.model.layers.rope import RopeTable
from exl2flow.model.layers.sublayer import Sublayer


class DeltaSublayer(Sublayer):
    """A `Sublayer` that ignores positions."""

    def __init__(
        self,
        spec: SublayerSpec,
        *,
        delta: DeltaSpec,
        args: DeltaArgs,
        norms: dict[str, Norm],
        linears: dict[str, Linear],
        multiplier: float = 1.0,
    ) -> None:
        super().__init__(spec, norms=norms, linears=linears, multiplier=multiplier)
        self.delta, self.args = delta, args

    def reads(
        self, hidden: torch.Tensor, *, start: int | RopeTable = 0, cache: LayerCache | None = None
    ) -> dict[str, torch.Tensor]:
        """Return what the first products read, and what the last one reads."""
        x = self.normed("before", hidden)
        return {"input": x, "inner": self.mix(x, self.apply_linears("input", x), cache)}

    def between(
        self,
        outputs: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        *,
        start: int | RopeTable = 0,
        cache: LayerCache | None = None,
        to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what the last product reads, of the outputs of the first ones; see attention."""
        return self.mix(self.normed("before", hidden), outputs, cache, to)

    def keep(
        self,
        outputs: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        *,
        start: int | RopeTable,
        cache: LayerCache,
    ) -> None:
        """Change the states in a cache; arguments as in `between`."""
        self.mix(self.normed("before", hidden), outputs, cache)

    def fill(self, hidden: torch.Tensor, *, start: int | RopeTable, cache: LayerCache) -> None:
        """Change the states in a cache by hidden states (b, t, hidden)."""
        x = self.normed("before", hidden)
        self.mix(x, self.apply_linears("input", x), cache)

    def mix(
        self,
        x: torch.Tensor,
        projected: Sequence[torch.Tensor],
        cache: LayerCache | None = None,
        to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what the last product reads, (b, t, width).

        Args:
            x: normed hidden states (b, t, hidden).
            projected: outputs of the first products.
            cache: has the states of the texts, and gets those after these tokens.
            to: as in `LayerCache.attend`; only with a cache.
        """
        qkv, z = self._parts(projected)
        if cache is not None and to is not None:
            return cache.advance(x, qkv, z, self.args, to)
        if cache is not None:
            return cache.advance(x, qkv, z, self.args)
        return get_ops(x.device).gated_delta(x, qkv, z, self.args)[0]

    def _parts(self, projected: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries, keys and values (b, t, channels), and gates' logits (b, t, width)."""
        if not self.delta.is_packed:
            qkv, z = projected
            return qkv, z
        spec, [packed] = self.delta, projected
        values = spec.width // spec.key_heads  # of a key head
        by_head = packed.view(*packed.shape[:-1], spec.key_heads, -1)
        parts = torch.split(by_head, [spec.key_dim, spec.key_dim, values, values], dim=-1)
        q, k, v, z = (part.flatten(-2) for part in parts)
        return torch.cat([q, k, v], dim=-1), z

    def products(self) -> Products:
        """See `Sublayer.products`."""
        first = product_of(self.with_roles("qkv", "z"), norm=self.norms.get("before"))
        return first, self.residual_product("out")


def load_delta(
    spec: SublayerSpec,
    delta: DeltaSpec,
    tensors: TensorFiles,
    *,
    eps: float,
    device: torch.device | str,
) -> DeltaArgs:
    """Load the tensors of a layer that no product has, in fp32.

    Raises:
        MissingTensor: one is absent.
        TensorShapeError: one has another shape than the config implies.
        NonFiniteState: the decay is infinite.
    """
    found = {
        role: read_shaped(tensors, name, shape).to(device, torch.float32)
        for role, (name, shape) in spec.plain.items()
    }
    if "ba" in found:  # rows by key head: of its value heads, b, then a
        both = found["ba"].view(delta.key_heads, 2, delta.value_heads // delta.key_heads, -1)
        maps = both.transpose(0, 1).flatten(0, 2)
    else:
        maps = torch.cat([found["b"], found["a"]])
    decay = -found["decay"].exp()
    if not decay.isfinite().all():
        name = spec.plain["decay"].name
        raise NonFiniteState(f"`{name}` holds NaN, or its exponential is infinite")
    return DeltaArgs(
        key_heads=delta.key_heads,
        value_heads=delta.value_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        conv=found["conv"].squeeze(1),
        decay=decay,
        step=found["step"],
        maps=maps,
        norm=found["norm"],
        eps=eps,
    )
