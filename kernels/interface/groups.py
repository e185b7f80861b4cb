"""The groups into which a quantized matrix's rows are divided, and their scales."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exl2flow.kernels.streams import device_cache, device_table, sent

SCALE_LEVELS = 16  # a 4-bit code stands for (code + 1) ** 2 / 256
PANEL_ROWS = 32  # rows processed together; every group begins at a multiple of it
MOST_COLUMNS = 1024  # per block of the output factor; torch waits for the GPU on wider ones
CHUNK_ELEMENTS = 1 << 26  # of a wide matrix that are processed together


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`rows` consecutive act-ordered rows from `start` that share a scale per column."""

    bits: int
    start: int
    rows: int

    @property
    def half_range(self) -> float:
        """Return half the number of codes, which is the zero point."""
        return float(2 ** (self.bits - 1))


def by_factor(x: torch.Tensor, factors: int) -> torch.Tensor:
    """Return a view of x (r, m), whose columns lie side by side by factor, as (factors, r, c)."""
    return x.view(len(x), factors, x.shape[1] // factors).transpose(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Scales of `j` matrices of n columns, by row panel.

    codes: uint8 (panels, j, n); maxima: fp16 (panels, j); both stored at the first panel of a
    group. decoded: fp32 (panels, j, n), the decoder's, at every panel of a group.
    """

    codes: torch.Tensor
    maxima: torch.Tensor
    decoded: torch.Tensor

    def of(self, panels: slice) -> "Scales":
        """Return views of the given panels."""
        return Scales(
            codes=self.codes[panels], maxima=self.maxima[panels], decoded=self.decoded[panels]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunGroups:
    """The groups of `j` matrices that begin at one row, as tensors on a device.

    longest: rows of the longest, r below. rows: int64 (j,); 0 for a matrix without one there.
    inside: fp32 (r, j, 1), 1 for rows inside a group; None: all are.
    """

    longest: int
    rows: torch.Tensor
    inside: torch.Tensor | None

    @classmethod
    def of(cls, groups: Sequence[Group | None], device: torch.device) -> "BegunGroups":
        """Describe the group of each matrix, or None."""
        rows = tuple(group.rows if group else 0 for group in groups)
        longest = max(rows)
        inside = None if min(rows) == longest else _inside(rows, device)
        return cls(longest=longest, rows=device_table(rows, device), inside=inside)

    def only(self, x: torch.Tensor) -> torch.Tensor:
        """Return x fp32 (r, m) with zeros outside the groups."""
        if self.inside is None:
            return x
        return (x.view(len(x), len(self.rows), -1) * self.inside).view(x.shape)


@device_cache
def half_ranges(bits: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return 2 ** (bits - 1) as fp32 on a device; shared like a `device_table`."""
    return sent(torch.tensor([2.0 ** (width - 1) for width in bits]), device)


@device_cache
def _inside(rows: tuple[int, ...], device: torch.device) -> torch.Tensor:
    inside = torch.arange(max(rows))[:, None] < torch.tensor(rows)
    return sent(inside.float()[:, :, None], device)
