"""Fuse linears that read the same input and share a row order."""

from collections.abc import Sequence

from exl2flow.kernels import GATED_ACTIVATIONS, MOST_MATRICES, FusedLinear, NormArgs
from exl2flow.model.layers.linear import Linear, PackedLinear

Products = tuple[FusedLinear | None, ...]  # before and after attention, or what down reads


def product_of(
    linears: Sequence[Linear],
    *,
    norm: NormArgs | None = None,
    activation: str | None = None,
    after: NormArgs | None = None,
    multiplier: float = 1.0,
    adds: bool = False,
    exact: bool = False,
) -> FusedLinear | None:
    """Return linears of the same input as one `FusedLinear`.

    None unless they are packed, share a row order, are at most `MOST_MATRICES`, and products know
    the activation.
    """
    if activation in GATED_ACTIVATIONS:
        return None
    matrices = tuple(linear.matrix for linear in linears if isinstance(linear, PackedLinear))
    if len(matrices) < len(linears) or len(matrices) > MOST_MATRICES:
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
