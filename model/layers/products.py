"""Fuse linears that read the same input and share a row order."""

from collections.abc import Sequence

from exl2flow.kernels import MOST_MATRICES, Norm, Product
from exl2flow.model.layers.linear import Linear, PackedLinear

# what comes before and after attention, or before and after what down reads
Pair = tuple[Product | None, Product | None]


def product_of(
    linears: Sequence[Linear],
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    after: Norm | None = None,
    multiplier: float = 1.0,
    adds: bool = False,
    exact: bool = False,
) -> Product | None:
    """Return linears of the same input as one `Product`.

    None unless they are packed, share a row order, and are at most `MOST_MATRICES`.
    """
    matrices = tuple(linear.matrix for linear in linears if isinstance(linear, PackedLinear))
    if len(matrices) < len(linears) or len(matrices) > MOST_MATRICES:
        return None
    if any(matrix.order is not matrices[0].order for matrix in matrices):
        return None
    return Product(
        matrices=matrices,
        norm=norm,
        activation=activation,
        after=after,
        multiplier=multiplier,
        adds=adds,
        exact=exact,
    )
