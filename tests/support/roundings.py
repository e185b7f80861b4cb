"""What tests of rounding share."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from exl2flow.kernels import Group
from exl2flow.quant.rounding.hessian import HessianFactor, MixedHessian, factor
from exl2flow.quant.sensitivity import fisher


def whole_groups(x: torch.Tensor, bits: int | Iterable[int]) -> list[Group]:
    """Return a group of all rows for each matrix of x (j, r, n), of one width or of one each."""
    widths = len(x) * [bits] if isinstance(bits, int) else bits
    return [Group(bits=width, start=0, rows=x.shape[1]) for width in widths]


def to_nearest(item: HessianFactor) -> HessianFactor:
    """Return a factor that carries no errors to later rows, in the same order."""
    return replace(item, upper=torch.eye(len(item.upper), device=item.upper.device))


def make_singular(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the stages Hessians that no damping makes regular."""

    def fail(hessian: MixedHessian, *, damping: float, name: str) -> HessianFactor:
        k = len(hessian.diagonal())
        spoiled = MixedHessian.plain(torch.full((k, k), torch.nan))
        return factor(spoiled, damping=damping, name=name)

    monkeypatch.setattr(fisher, "factor", fail)
