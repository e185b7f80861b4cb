"""The groups into which a quantized matrix's rows are divided."""

from dataclasses import dataclass

SCALE_LEVELS = 16  # a 4-bit code stands for (code + 1) ** 2 / 256
PANEL_ROWS = 32  # rows processed together; every group begins at a multiple of it


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
