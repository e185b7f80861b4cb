"""Chains: all fused linears between two attentions of a packed model, as one launch.

From an attention's output to the next queries, keys and values, each product reads what the one
before it writes, so a GPU runs the chain of few tokens in one launch (`Ops.multiply`) where its
kernel knows all of it. Before a parallel block a chain ends with the hidden state, which both of
its parts read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from exl2flow.kernels import FusedLinear, get_ops
from exl2flow.model.layers.attention import AttentionSublayer, KvCache, Projected
from exl2flow.model.layers.norms import Norm
from exl2flow.model.layers.parallel import ParallelSublayer
from exl2flow.model.layers.rope import RopeTables, at_layer
from exl2flow.model.layers.sublayer import Sublayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The first products of a parallel block, and those of its MLP; all read one norm's result."""

    norm: Norm | None
    inputs: FusedLinear
    mlp: Sequence[FusedLinear]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An attention, and the chain of products before it.

    beside: what follows the chain in a parallel block; None: the chain ends with queries, keys and
    values.
    """

    attention: AttentionSublayer
    chain: Sequence[FusedLinear]
    beside: Beside | None = None

    def inputs(
        self, x: torch.Tensor, states: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return queries, keys and values, and the hidden states, (rows, columns) each.

        Args:
            x: what the chain reads, fp16 (rows, k).
            states: hidden states before it, (rows, hidden).
        """
        ops = get_ops(x.device)
        if self.beside is None:
            return ops.multiply(x, self.chain, states)
        found, x, states = self._beside(self.beside, x, states)
        return found, ops.multiply(x, self.beside.mlp, states)[1]

    def attended(
        self,
        x: torch.Tensor,
        states: torch.Tensor,
        shape: torch.Size,
        start: int | RopeTables,
        cache: KvCache | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what o reads, (rows, columns), and the hidden states.

        Args:
            x: as of `inputs`.
            states: as of `inputs`.
            shape: of the hidden states, (b, t, hidden).
            start: of all layers, see `Sublayer`.
            cache: of all layers.
        """
        found, states = self.inputs(x, states)
        index = self.attention.spec.layer_index
        layer = None if cache is None else cache.layer(index)
        projected = _projected(found, shape)
        inner = self.attention.attend(projected, start=at_layer(start, index), cache=layer)
        return inner.reshape(-1, inner.shape[-1]), states

    def fill(
        self,
        x: torch.Tensor,
        states: torch.Tensor,
        shape: torch.Size,
        start: int | RopeTables,
        cache: KvCache,
    ) -> None:
        """Add the attention's keys and values to a cache; arguments as of `attended`."""
        if self.beside is None:
            found, _ = self.inputs(x, states)
        else:
            found, _, _ = self._beside(self.beside, x, states)
        index = self.attention.spec.layer_index
        projected, layer = _projected(found, shape), cache.layer(index)
        self.attention.store(projected, start=at_layer(start, index), cache=layer)

    def _beside(
        self, beside: Beside, x: torch.Tensor, states: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, what they and the MLP read, and the hidden states."""
        ops = get_ops(x.device)
        if self.chain:
            _, states = ops.multiply(x, self.chain, states)
        x = states if beside.norm is None else beside.norm(states)
        found, _ = ops.multiply(x, [beside.inputs])
        return found, x, states


def _projected(found: Sequence[torch.Tensor], shape: torch.Size) -> Projected:
    q, k, v = (y.view(*shape[:-1], -1) for y in found)
    return Projected(q=q, k=k, v=v)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """The attentions with what leads to them, and the products after the last one."""

    links: Sequence[Link]
    last: Sequence[FusedLinear]

    @classmethod
    def of(cls, sublayers: Sequence[Sublayer]) -> Self | None:
        """Return the chains of sublayers, or None unless all their linears are packed."""
        links: list[Link] = []
        chain: list[FusedLinear] = []
        for sublayer in sublayers:
            pairs = sublayer.products()
            products = [product for pair in pairs for product in pair if product is not None]
            if len(products) < 2 * len(pairs):
                return None
            if isinstance(sublayer, AttentionSublayer):
                first, last = products
                links.append(Link(attention=sublayer, chain=[*chain, first]))
                chain = [last]
            elif isinstance(sublayer, ParallelSublayer):
                first, last, *mlp = products
                beside = Beside(norm=sublayer.norms.get("before"), inputs=first, mlp=mlp)
                links.append(Link(attention=sublayer.attention, chain=chain, beside=beside))
                chain = [last]
            else:
                chain += products
        return cls(links=links, last=chain) if links else None

    def __call__(
        self, hidden: torch.Tensor, *, start: int | RopeTables = 0, cache: KvCache | None = None
    ) -> torch.Tensor:
        """Map hidden states fp16 (b, t, hidden) to those that the head reads; see `Sublayer`."""
        shape = hidden.shape
        x = states = hidden.reshape(-1, shape[-1])
        for link in self.links:
            x, states = link.attended(x, states, shape, start, cache)
        _, states = get_ops(x.device).multiply(x, self.last, states)
        return states.view(shape)

    def fill(self, hidden: torch.Tensor, *, start: int | RopeTables, cache: KvCache) -> None:
        """Add the keys and values of hidden states to a cache; see `Decoder.fill`."""
        shape = hidden.shape
        x = states = hidden.reshape(-1, shape[-1])
        *links, last = self.links
        for link in links:
            x, states = link.attended(x, states, shape, start, cache)
        last.fill(x, states, shape, start, cache)
