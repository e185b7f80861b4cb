"""Fuse linears that read the same input and share a row order, and run chains of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

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


_Part = tuple[list[FusedLinear], FusedLinear, FusedLinear]  # what runs; first and last as given
_PARTS = WeakKeyDictionary[FusedLinear, dict[tuple[FusedLinear, ...], list[_Part]]]()


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
    results = [x]
    for index, (part, first, last) in enumerate(_parts(products)):
        x = results[0]
        whole = None if index else _whole(products)
        at_once = None if whole is None else ops.multiply_at_once(x, whole, hidden)
        if at_once is not None:
            return at_once
        if isinstance(first, Exchange) and first.gather is not None:
            x = first.gather(x)
        results, states = ops.multiply(x, part, hidden)
        hidden = states if hidden is not None or any(product.adds for product in part) else None
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


def _parts(products: Sequence[FusedLinear]) -> list[_Part]:
    """Return what runs between two exchanges, made once: plans go by the identity of products."""
    known, key = _PARTS.setdefault(products[0], {}), tuple(products[1:])
    if key not in known:
        known[key], begin = [], 0
        for end, last in enumerate(products, 1):
            is_exchanged = isinstance(last, Exchange) and last.added is not None
            if is_exchanged or end == len(products):
                part = [p.core or p if isinstance(p, Exchange) else p for p in products[begin:end]]
                known[key].append((part, products[begin], last))
                begin = end
    return known[key]


_WHOLES = WeakKeyDictionary[FusedLinear, dict[tuple[FusedLinear, ...], list[FusedLinear] | None]]()


def _whole(products: Sequence[FusedLinear]) -> list[FusedLinear] | None:
    """Return products of which a kernel can do the only sum of all ranks, made once; else None."""
    known, key = _WHOLES.setdefault(products[0], {}), tuple(products[1:])
    if key not in known:
        sums = [p for p in products if isinstance(p, Exchange) and p.added is not None]
        shared = [p for p in products if isinstance(p, Exchange)]
        can_run = len(sums) == 1 and all(p.whole is not None for p in shared)
        plain = [p.whole or p if isinstance(p, Exchange) else p for p in products]
        known[key] = plain if can_run else None
    return known[key]
