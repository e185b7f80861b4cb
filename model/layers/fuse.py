"""Fuse linears that read the same input and share a row order, and run chains of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from exl2flow.kernels import GATED_ACTIVATIONS, MOST_MATRICES, FusedLinear, NormArgs, get_ops
from exl2flow.model.layers.linear import Linear, PackedLinear, SharedLinear

Products = tuple[FusedLinear | None, ...]  # before and after attention, or what down reads


def product_of(
    linears: Sequence[Linear],
    *,
    beside: Sequence[Linear] = (),
    norm: NormArgs | None = None,
    activation: str | None = None,
    after: NormArgs | None = None,
    multiplier: float = 1.0,
    adds: bool = False,
    exact: bool = False,
) -> FusedLinear | None:
    """Return linears of the same input as one `FusedLinear`.

    None unless they are packed, share a row order, are at most `MOST_MATRICES`, and products know
    the activation. beside: linears of the same input with results of their own, if the others gate.
    """
    if activation in GATED_ACTIVATIONS or (beside and len(linears) == 1):
        return None
    if max(len(linears), len(beside)) > MOST_MATRICES:
        return None
    linears = [*linears, *beside]
    shared = linears[0] if isinstance(linears[0], SharedLinear) else None
    if shared is not None:
        if shared.gather is None and shared.total is None:
            return None
        linears = [shared.linear]
    matrices = tuple(linear.matrix for linear in linears if isinstance(linear, PackedLinear))
    if len(matrices) < len(linears):
        return None
    if any(matrix.order is not matrices[0].order for matrix in matrices):
        return None
    product = FusedLinear(
        matrices=matrices,
        norm=norm,
        activation=activation,
        after=after,
        multiplier=multiplier,
        adds=adds,
        exact=exact,
    )
    return product if shared is None else Exchange.of(product, shared)


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class Exchange(FusedLinear):
    """A product of which this process computes a part; see `SharedLinear`."""

    gather: Callable[..., torch.Tensor] | None = None
    added: Callable[..., torch.Tensor] | None = None
    core: FusedLinear | None = None  # what this process computes
    whole: FusedLinear | None = None  # the same and the exchange, if a kernel does both
    guard: Callable[[], None] | None = None  # see `Ranks`

    @classmethod
    def of(cls, product: FusedLinear, shared: SharedLinear) -> "Exchange":
        """Return a product that exchanges what a linear does."""
        core, whole = product, None
        if shared.total is not None:
            core = FusedLinear(matrices=product.matrices, exact=True)
            if shared.boxes is not None and product.after is None and product.adds:
                whole = replace(product, boxes=shared.boxes)
        fields = {name: getattr(product, name) for name in FusedLinear.__dataclass_fields__}
        fields |= {"boxes": shared.boxes, "guard": shared.guard}
        return cls(**fields, gather=shared.gather, added=shared.added, core=core, whole=whole)

    def ordered(self) -> "Exchange":
        """Return the product of columns that are gathered in the order of its rows."""
        assert self.gather is not None
        assert self.core is not None
        gather = partial(self.gather, to=torch.argsort(self.order).int())
        core = replace(self.core, is_ordered=True)
        whole = None if self.boxes is None else replace(core, boxes=None, gathers=self.boxes)
        return replace(self, is_ordered=True, gather=gather, core=core, whole=whole)


def multiply(
    x: torch.Tensor, products: Sequence[FusedLinear], hidden: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """See `Ops.multiply`; processes that share a model exchange their parts in between."""
    ops = get_ops(x.device)
    exchanges = [product for product in products if isinstance(product, Exchange)]
    if not exchanges:
        return ops.multiply(x, products, hidden)
    if (guard := exchanges[0].guard) is not None:
        guard()
    whole = _whole(products)
    at_once = None if whole is None else ops.multiply_at_once(x, whole, hidden)
    if at_once is not None:
        return at_once
    results = [x]
    for part in _parts(products):
        x, first, last = results[0], part[0], part[-1]
        if isinstance(first, Exchange) and first.gather is not None:
            x = first.gather(x)
        cores = [p.core or p if isinstance(p, Exchange) else p for p in part]
        results, states = ops.multiply(x, cores, hidden)
        hidden = states if hidden is not None or any(core.adds for core in cores) else None
        if isinstance(last, Exchange) and last.added is not None:
            total, *beside = results
            hidden = _added(last, last.added, total, hidden)
            results = [hidden, *beside]
    return results, results[0] if hidden is None else hidden


def _added(
    last: FusedLinear,
    added: Callable[..., torch.Tensor],
    part: torch.Tensor,
    hidden: torch.Tensor | None,
) -> torch.Tensor:
    """Return the next hidden state, fp16, of this process's part of a sum, fp32, and the last."""
    if last.after is None:
        return added(part, hidden, last.multiplier)
    total = get_ops(part.device).norm(added(part), last.after).float() * last.multiplier
    return (total if hidden is None else hidden + total).half()


def _parts(products: Sequence[FusedLinear]) -> Iterator[Sequence[FusedLinear]]:
    """Yield what runs between two sums of all ranks."""
    begin = 0
    for end, last in enumerate(products, 1):
        is_summed = isinstance(last, Exchange) and last.added is not None
        if is_summed or end == len(products):
            yield products[begin:end]
            begin = end


def _whole(products: Sequence[FusedLinear]) -> list[FusedLinear] | None:
    """Return products of which a kernel can do all exchanges, at most one sum; else None."""
    shared = [p for p in products if isinstance(p, Exchange)]
    if sum(p.added is not None for p in shared) > 1 or any(p.whole is None for p in shared):
        return None
    return [p.whole or p if isinstance(p, Exchange) else p for p in products]
