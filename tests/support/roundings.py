"""What tests of rounding share."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from exl2flow.kernels import Group
from exl2flow.quant.rounding.hessian import HessianFactor


def whole_groups(x: torch.Tensor, bits: int | Iterable[int]) -> list[Group]:
    """Return a group of all rows for each matrix of x (j, r, n), of one width or of one each."""
    widths = len(x) * [bits] if isinstance(bits, int) else bits
    return [Group(bits=width, start=0, rows=x.shape[1]) for width in widths]


def to_nearest(factor: HessianFactor) -> HessianFactor:
    """Return a factor that carries no errors to later rows, in the same order."""
    return replace(factor, upper=torch.eye(len(factor.upper), device=factor.upper.device))
