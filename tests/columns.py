"""Groups for searches of scales."""

from collections.abc import Iterable

import torch

from exl2flow.kernels import Group


def whole_groups(x: torch.Tensor, bits: int | Iterable[int]) -> list[Group]:
    """Return a group of all rows for each matrix of x (j, r, n), of one width or of one each."""
    widths = len(x) * [bits] if isinstance(bits, int) else bits
    return [Group(bits=width, start=0, rows=x.shape[1]) for width in widths]
