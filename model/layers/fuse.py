"""Fuse linears that read the same input and share a row order, and run chains of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

    gather: Callable[[torch.Tensor], torch.Tensor] | None = None
    total: Callable[[torch.Tensor], torch.Tensor] | None = None
    core: FusedLinear | None = None  # what this process computes

    @classmethod
    def of(cls, product: FusedLinear, shared: SharedLinear) -> "Exchange":
        """Return a product that exchanges what a linear does."""
        core = product
        if shared.total is not None:
            core = FusedLinear(matrices=product.matrices, exact=True)
        fields = {name: getattr(product, name) for name in FusedLinear.__dataclass_fields__}
        return cls(**fields, gather=shared.gather, total=shared.total, core=core)


_Part = tuple[list[FusedLinear], FusedLinear, FusedLinear]  # what runs; first and last as given
_PARTS = WeakKeyDictionary[FusedLinear, dict[tuple[FusedLinear, ...], list[_Part]]]()


def multiply(
    x: torch.Tensor, products: Sequence[FusedLinear], hidden: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """See `Ops.multiply`; processes that share a model exchange their parts in between."""
    ops = get_ops(x.device)
    if not any(isinstance(product, Exchange) for product in products):
        return ops.multiply(x, products, hidden)
    results = [x]
    for part, first, last in _parts(products):
        x = results[0]
        if isinstance(first, Exchange) and first.gather is not None:
            x = first.gather(x)
        results, states = ops.multiply(x, part, hidden)
        hidden = states if hidden is not None or any(product.adds for product in part) else None
        if isinstance(last, Exchange) and last.total is not None:
            total, *beside = results
            hidden = _added(last, last.total(total), hidden)
            results = [hidden, *beside]
    return results, results[0] if hidden is None else hidden


def _added(last: FusedLinear, total: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """Return the next hidden state, fp16, of a sum fp32 and the last one."""
    if last.after is not None:
        total = get_ops(total.device).norm(total.half(), last.after).float()
    if last.multiplier != 1.0:
        total = total * last.multiplier
    return (total if hidden is None else hidden + total).half()


def _parts(products: Sequence[FusedLinear]) -> list[_Part]:
    """Return what runs between two exchanges, made once: plans go by the identity of products."""
    known, key = _PARTS.setdefault(products[0], {}), tuple(products[1:])
    if key not in known:
        known[key], begin = [], 0
        for end, last in enumerate(products, 1):
            is_exchanged = isinstance(last, Exchange) and last.total is not None
            if is_exchanged or end == len(products):
                part = [p.core or p if isinstance(p, Exchange) else p for p in products[begin:end]]
                known[key].append((part, products[begin], last))
                begin = end
    return known[key]
