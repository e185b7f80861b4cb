"""Fuse linears that read the same input and share a row order."""

from collections.abc import Sequence

from exl2flow.kernels import GATED_ACTIVATIONS, MOST_MATRICES, FusedLinear, NormArgs
from exl2flow.model.layers.linear import Linear, PackedLinear

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
    matrices = tuple(linear.matrix for linear in linears if isinstance(linear, PackedLinear))
    if len(matrices) < len(linears):
        return None
    if any(matrix.order is not matrices[0].order for matrix in matrices):
        return None
    return FusedLinear(
        matrices=matrices,
        norm=norm,
        activation=activation,
        after=after,
        multiplier=multiplier,
        adds=adds,
        exact=exact,
    )
