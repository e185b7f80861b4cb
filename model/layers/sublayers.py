"""Sublayers: the unit that is run, measured and quantized, in two phases.

`reads` computes what projections read, `output` applies the last ones and adds the residual. A
caller may run both separately and replace any linear between them.
"""

from collections.abc import Mapping
from typing import Protocol, Self

import torch

from exl2flow.model.config.activations import ACTIVATIONS
from exl2flow.model.config.spec import ModelSpec
from exl2flow.model.config.sublayer_spec import SublayerSpec
from exl2flow.model.files.weights import TensorFiles
from exl2flow.model.layers.attention import AttentionSublayer, LayerCache
from exl2flow.model.layers.fuse import Pair
from exl2flow.model.layers.half_layer import FusedProjections
from exl2flow.model.layers.linear import Linear, RowOrders, load_linear
from exl2flow.model.layers.mlp import MlpSublayer
from exl2flow.model.layers.norms import Norm, load_norm
from exl2flow.model.layers.parallel import ParallelSublayer
from exl2flow.model.layers.rope import RopeTable


class Sublayer(Protocol):
    """What all kinds share; `linears` (by name) and `norms` (by role) may be replaced one by one.

    A projection's `capture` names what it reads.
    """

    spec: SublayerSpec
    linears: dict[str, Linear]
    norms: dict[str, Norm]

    def reads(
        self, hidden: torch.Tensor, *, start: int | RopeTable = 0, cache: LayerCache | None = None
    ) -> dict[str, torch.Tensor]:
        """Return by capture what the projections read, (b, t, k) each, in order.

        Args:
            hidden: (b, t, hidden).
            start: position of the first token, or the rotation of all tokens.
            cache: receives this call's keys and values and returns all of them.
        """
        ...

    def output(self, hidden: torch.Tensor, reads: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the next hidden state, (b, t, hidden), of a hidden state and its `reads`."""
        ...

    def products(self) -> tuple[Pair, ...]:
        """Return the products of each part: before and after attention, or what down reads.

        Those of a parallel block's parts read the norm of hidden states, and both parts are added
        to them. None where linears are not all packed.
        """
        ...

    def replaced(self, together: FusedProjections) -> Self:
        """Return a sublayer that shares norms and linears, but calls functions in their place.

        Args:
            together: capture → function from what is read to the outputs of all its projections.
        """
        ...

    def __call__(
        self, hidden: torch.Tensor, *, start: int | RopeTable = 0, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Map hidden states to the next hidden states, (b, t, hidden)."""
        ...


def build_sublayer(
    spec: ModelSpec,
    sublayer: SublayerSpec,
    tensors: TensorFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    packed: bool = False,
) -> Sublayer:
    """Load one sublayer; `packed` as in `load_linear`.

    Raises:
        MissingTensor: one of its tensors is absent.
        TensorShapeError: a tensor contradicts the config.
    """
    orders = RowOrders(device)
    linears = {
        projection.name: load_linear(
            tensors,
            projection,
            dtype=dtype,
            device=device,
            zero_offset=spec.zero_offset,
            packed=packed,
            orders=orders,
        )
        for projection in sublayer.projections
    }
    norms: dict[str, Norm] = {
        norm.role: load_norm(tensors, norm, dtype=dtype, device=device) for norm in sublayer.norms
    }
    multiplier = spec.residual_multiplier

    def attention() -> AttentionSublayer:
        return AttentionSublayer(
            sublayer,
            attention=spec.attentions[sublayer.layer_index],
            norms=norms,
            linears=linears,
            multiplier=multiplier,
        )

    def mlp() -> MlpSublayer:
        activation = ACTIVATIONS[spec.mlp.activation]
        return MlpSublayer(
            sublayer, norms=norms, linears=linears, activation=activation, multiplier=multiplier
        )

    match sublayer.kind:
        case "attention":
            return attention()
        case "mlp":
            return mlp()
        case "parallel":
            return ParallelSublayer(attention(), mlp())
