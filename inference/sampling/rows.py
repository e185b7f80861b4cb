"""A batch's settings as the sampler chain reads them: one row of numbers per sequence."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from exl2flow.core.sampling import GREEDY_BELOW, SamplingSettings

FEW = 64  # settings that keep at most this many candidates share the same operations
EVERYTHING = 2**31  # more than any vocabulary has
HOTTEST = sys.float_info.max  # -infinity divided by it is still -infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRows:
    """The sampler's settings on the sampling device, and the one number the host needs.

    table: fp64 (b, 4): temperature, top_k, top_p and min_p. A disabled step has a value that keeps
        everything; rows that always take the likeliest token keep one.
    most: most candidates that any row can keep; None if some row may keep any number. It decides
        which operations are launched: 1 is an argmax.
    """

    table: torch.Tensor
    most: int | None

    @classmethod
    def of(cls, settings: Sequence[SamplingSettings], device: torch.device | str = "cpu") -> Self:
        """Build from the settings of each sequence."""
        rows = [_row(each) for each in settings]
        table = torch.tensor(rows, dtype=torch.float64, device=device)
        most = max(int(top_k) for _, top_k, *_ in rows)
        if 1 < most < EVERYTHING:
            most = max(FEW, 1 << (most - 1).bit_length())
        return cls(table=table, most=None if most >= EVERYTHING else most)


def _row(settings: SamplingSettings) -> tuple[float, float, float, float]:
    is_greedy = settings.temperature < GREEDY_BELOW
    return (
        1.0 if is_greedy else min(settings.temperature, HOTTEST),
        1 if is_greedy else min(settings.top_k or EVERYTHING, EVERYTHING),
        settings.top_p if 0 < settings.top_p < 1 else math.inf,
        settings.min_p,
    )
