"""Normalization over the last axis: of a root mean square, or of a deviation from the mean."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class NormArgs:
    """y = RN(x / sqrt(mean(x²) + eps)) · weight + bias over the last axis, the division in fp32.

    weight: (d,), or (heads, d) for x (…, heads, t, d).
    eps: keeps rows of zeros finite.
    bias: of the weight's shape; or None.
    centered: subtract the mean of x first (LayerNorm).
    """

    weight: torch.Tensor
    eps: float
    bias: torch.Tensor | None = None
    centered: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it only divides by the root mean square and multiplies by one weight."""
        return not self.centered and self.bias is None and self.weight.dim() == 1
