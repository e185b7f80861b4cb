"""How the rows of a quantized matrix are divided."""

from dataclasses import dataclass

SCALE_LEVELS = 16  # 4-bit codes stand for (code + 1) ** 2 of 256
PANEL_ROWS = 32  # rows are worked on so many at a time; every group begins at a multiple of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`rows` consecutive act-ordered rows from `start` that share a scale per column."""

    bits: int
    start: int
    rows: int

    @property
    def half_range(self) -> float:
        """Return half of the number of codes, that of the zero point."""
        return float(2 ** (self.bits - 1))
