"""Chains: all fused linears between two attentions of a packed model, as one launch.

From an attention's output to the next queries, keys and values, each product reads what the one
before it writes, so a GPU runs the chain of few tokens in one launch (`Ops.multiply`) where its
kernel knows all of it. A parallel block's MLP comes before its attention: queries, keys and values
are computed beside it. Before experts a chain ends with hidden states, and another one begins
behind them. In a decode step, attention writes what a chain reads in the order of its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from exl2flow.kernels import FEW_ROWS, ExpertBank, FusedLinear
from exl2flow.model.layers.attention import AttentionSublayer
from exl2flow.model.layers.cache import KvCache
from exl2flow.model.layers.delta import DeltaSublayer
from exl2flow.model.layers.experts import ExpertsSublayer, Total, run_experts
from exl2flow.model.layers.fuse import Exchange, multiply
from exl2flow.model.layers.parallel import ParallelSublayer
from exl2flow.model.layers.rope import RopeTables, at_layer
from exl2flow.model.layers.sublayer import Sublayer


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLink:
    """Products that are added to hidden states, then the layer of experts behind them.

    total: see `ExpertsSublayer`.
    """

    chain: Sequence[FusedLinear]
    bank: ExpertBank
    total: Total | None = None

    def __call__(self, x: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states, (rows, hidden), of what the chain reads and theirs."""
        if self.chain:
            _, states = multiply(x, self.chain, states)
        return run_experts(states, self.bank, self.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An attention or a layer with a state, and the chain of products before it.

    The chain ends with what the sublayer computes first, such as queries, keys and values; in a
    parallel block with the MLP, beside which these are computed.

    runs: layers of experts before the chain, which then reads hidden states.
    alone: of a parallel block: what computes these, if nobody reads hidden states behind it.
    to: where the elements of an attention output go, see `StepCache`; None: in order.
    """

    mixer: AttentionSublayer | DeltaSublayer
    chain: Sequence[FusedLinear]
    runs: Sequence[ExpertLink] = ()
    alone: FusedLinear | None = None
    to: torch.Tensor | None = None

    @property
    def calls(self) -> list[Sequence[FusedLinear]]:
        """The products of each call of `Ops.multiply`."""
        return [
            products for products in (*(run.chain for run in self.runs), self.chain) if products
        ]

    def project(
        self, x: torch.Tensor, states: torch.Tensor, chain: Sequence[FusedLinear]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return what the sublayer computes first, and hidden states, (rows, columns) each.

        Args:
            x: what the chain reads, fp16 (rows, k); see `FusedLinear.is_ordered`.
            states: hidden states before it, (rows, hidden).
            chain: this one's, or what is needed of it.
        """
        for run in self.runs:
            x = states = run(x, states)
        results, states = multiply(x, chain, states)
        return results[chain[-1].adds :], states

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
            x: as in `project`.
            states: as in `project`.
            shape: of the hidden states, (b, t, hidden).
            start: of all layers, see `Sublayer`.
            cache: of all layers.
        """
        qkv, states = self.project(x, states, self.chain)
        index = self.mixer.spec.layer_index
        layer = None if cache is None else cache.layer(index)
        inner = self.mixer.between(
            _viewed(qkv, shape),
            states.view(shape),
            start=at_layer(start, index),
            cache=layer,
            to=self.to,
        )
        return inner.reshape(-1, inner.shape[-1]), states

    def fill(
        self,
        x: torch.Tensor,
        states: torch.Tensor,
        shape: torch.Size,
        start: int | RopeTables,
        cache: KvCache,
    ) -> None:
        """Add the attention's keys and values to a cache; arguments as in `attended`."""
        chain = self.chain if self.alone is None else [*self.chain[:-2], self.alone]
        qkv, states = self.project(x, states, chain)
        index = self.mixer.spec.layer_index
        outputs, table, layer = _viewed(qkv, shape), at_layer(start, index), cache.layer(index)
        self.mixer.keep(outputs, states.view(shape), start=table, cache=layer)


def _viewed(outputs: Sequence[torch.Tensor], shape: torch.Size) -> list[torch.Tensor]:
    return [y.view(*shape[:-1], -1) for y in outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """The attentions with what leads to them, and what comes after the last one.

    last_runs: layers of experts, before the last products, of which there may be none.
    ordered: the same, where each attention writes its output in the order of o's rows.
    """

    links: Sequence[Link]
    last: Sequence[FusedLinear]
    last_runs: Sequence[ExpertLink] = ()
    ordered: Self | None = None

    @classmethod
    def of(cls, sublayers: Sequence[Sublayer]) -> Self | None:
        """Return the chains of sublayers, or None unless all their linears are packed."""
        links: list[Link] = []
        chain: list[FusedLinear] = []
        runs: list[ExpertLink] = []
        for sublayer in sublayers:
            if isinstance(sublayer, ExpertsSublayer) and sublayer.bank and not sublayer.together:
                link = ExpertLink(chain=chain, bank=sublayer.bank, total=sublayer.total)
                runs, chain = [*runs, link], []
                continue
            candidates = sublayer.products()
            products = [product for product in candidates if product is not None]
            if len(products) < len(candidates):
                return None
            if isinstance(sublayer, AttentionSublayer | DeltaSublayer):
                first, last = products
                links.append(Link(mixer=sublayer, chain=[*chain, first], runs=runs))
                chain, runs = [last], []
            elif isinstance(sublayer, ParallelSublayer):
                first, down, last = products
                alone = FusedLinear(matrices=first.beside, norm=first.norm)
                chain = [*chain, first, down]
                links.append(Link(mixer=sublayer.attention, chain=chain, runs=runs, alone=alone))
                chain, runs = [last], []
            else:
                chain += products
        if not links:
            return None
        whole = cls(links=links, last=chain, last_runs=runs)
        return replace(whole, ordered=whole._ordered())

    def _ordered(self) -> Self:
        """Return links whose attentions write their outputs in the order of what reads them."""
        readers = [
            _ordered(runs, chain)
            for runs, chain in (
                *((link.runs, link.chain) for link in self.links[1:]),
                (self.last_runs, self.last),
            )
        ]
        leading = [(self.links[0].runs, self.links[0].chain), *((r, c) for r, c, _ in readers[:-1])]
        ordered = [
            replace(link, runs=runs, chain=chain, to=to)
            for link, (runs, chain), (_, _, to) in zip(self.links, leading, readers, strict=True)
        ]
        runs, last, _ = readers[-1]
        return replace(self, links=ordered, last_runs=runs, last=last)

    def __call__(
        self, hidden: torch.Tensor, *, start: int | RopeTables = 0, cache: KvCache | None = None
    ) -> torch.Tensor:
        """Map hidden states fp16 (b, t, hidden) to what the head reads; see `Sublayer`."""
        shape = hidden.shape
        x = states = hidden.reshape(-1, shape[-1])
        chains = self._for(len(x), cache)
        for link in chains.links:
            x, states = link.attended(x, states, shape, start, cache)
        for run in chains.last_runs:
            x = states = run(x, states)
        if chains.last:
            _, states = multiply(x, chains.last, states)
        return states.view(shape)

    def fill(self, hidden: torch.Tensor, *, start: int | RopeTables, cache: KvCache) -> None:
        """Add the keys and values of hidden states to a cache; see `Decoder.fill`."""
        shape = hidden.shape
        x = states = hidden.reshape(-1, shape[-1])
        *links, last = self._for(len(x), cache).links
        for link in links:
            x, states = link.attended(x, states, shape, start, cache)
        last.fill(x, states, shape, start, cache)

    def of_step(self, rows: int) -> "Chains":
        """Return the chains of a step whose attention can write in order: few rows are read so."""
        return self if self.ordered is None or rows > FEW_ROWS else self.ordered

    def _for(self, rows: int, cache: KvCache | None) -> "Chains":
        return self if cache is None or not cache.orders_results else self.of_step(rows)


def _ordered(
    runs: Sequence[ExpertLink], chain: Sequence[FusedLinear]
) -> tuple[Sequence[ExpertLink], Sequence[FusedLinear], torch.Tensor | None]:
    """Return what reads an attention, taking it in its order, and where its elements then go."""
    to: torch.Tensor | None
    first, *others = runs[0].chain if runs else chain
    if isinstance(first, Exchange):  # attention gives heads, which are ordered when they meet
        if first.gather is None:
            return runs, chain, None
        to, first = None, first.ordered()
    else:
        to, first = torch.argsort(first.order).int(), replace(first, is_ordered=True)
    read = [first, *others]
    if not runs:
        return runs, read, to
    return [replace(runs[0], chain=read), *runs[1:]], chain, to
