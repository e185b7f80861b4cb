"""A decoder over the weights of another one, whose linears add low-rank products x Aᵀ Bᵀ.

The linears that read one activation are multiplied together, as are their A.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch.nn import functional

from exl2flow.kernels import MOST_MATRICES, get_ops
from exl2flow.model.layers.decoder import Decoder
from exl2flow.model.layers.fuse import product_of
from exl2flow.model.layers.sublayer import Sublayer

Matrices = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # key → A (r, k) and Bᵀ (r, n)


class LowRank:
    """The linears of a sublayer that read one activation, and room for A and B of each.

    device: of all of them; down: (linears, ranks, k), or None; ups: (ranks, n) each; unused: bool,
    True where a token (b, t, 1, ranks) leaves a rank out.
    """

    def __init__(self, sublayer: Sublayer, capture: str, device: torch.device) -> None:
        self.device = device
        self._projections = sublayer.spec.reading(capture)
        self.keys = {p.key for p in self._projections}
        self._linears = [sublayer.linears[p.name] for p in self._projections]
        self._products = [
            product_of(self._linears[first : first + MOST_MATRICES])
            for first in range(0, len(self._linears), MOST_MATRICES)
        ]
        self.down: torch.Tensor | None = None
        self.ups: list[torch.Tensor] = []
        self.unused = torch.empty(0, dtype=torch.bool)

    def room(self, ranks: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return a new `down` and `ups`, of zeros."""
        zeros = partial(torch.zeros, dtype=dtype, device=self.device)
        down = zeros(len(self._linears), ranks, self._projections[0].in_features)
        return down, [zeros(ranks, p.out_features) for p in self._projections]

    def put(self, matrices: Matrices, first: int, ranks: int) -> None:
        """Store matrices in `ranks` ranks from `first` on, and zero the ranks they do not fill."""
        if self.down is not None:
            for p, *halves in zip(self._projections, self.down, self.ups, strict=True):
                for stored, half in zip(halves, matrices.get(p.key, ()), strict=False):
                    stored[first : first + len(half)] = half
                filled = len(matrices[p.key][0]) if p.key in matrices else 0
                for stored in halves:
                    stored[first + filled : first + ranks] = 0

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs (b, t, n) of the linears for their input (b, t, k)."""
        products = [product for product in self._products if product is not None]
        if len(products) < len(self._products) or x.dtype != torch.float16:
            outputs = [linear(x) for linear in self._linears]
        else:
            rows, ops = x.flatten(0, 1), get_ops(x.device)
            flat = [y for product in products for y in ops.multiply(rows, [product])[0]]
            outputs = [y.view(*x.shape[:2], -1) for y in flat]
        if self.down is not None:
            low = functional.linear(x, self.down.flatten(0, 1))
            low = (
                low.view(*x.shape[:2], len(outputs), -1).masked_fill_(self.unused, 0).flatten(0, 1)
            )
            for index, up in enumerate(self.ups):
                outputs[index].view(-1, up.shape[1]).addmm_(low[:, index], up)
        return outputs


def with_low_rank(decoder: Decoder) -> tuple[Decoder, list[LowRank]]:
    """Return a decoder that shares all weights, and the places of low-rank matrices, all empty."""
    twins: list[Sublayer] = []
    parts: list[LowRank] = []
    for base in decoder.sublayers:
        if base.spec.group is not None:  # no adapter has matrices of experts
            twins.append(base)
            continue
        captures = dict.fromkeys(p.capture for p in base.spec.projections)
        device = decoder.placement.layers[base.spec.layer_index]
        low_ranks = {capture: LowRank(base, capture, device) for capture in captures}
        twins.append(base.replaced(low_ranks))
        parts += low_ranks.values()
    adapted = Decoder(
        decoder.spec,
        embedding=decoder.embedding,
        sublayers=twins,
        head=decoder.head,
        placement=decoder.placement,
    )
    return adapted, parts
