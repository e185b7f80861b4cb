"""Steps of a warp: panels of a block that it fetches and multiplies together."""

from collections.abc import Sequence

from exl2flow.kernels.interface.packed import (
    BLOCK_PANELS,
    BLOCK_WORDS,
    LANES,
    PackedMatrix,
    Panel,
)

WARPS = 16  # per CTA
STEP = 4 * BLOCK_WORDS  # most bytes of codes that a warp fetches at once


def slot_bytes(matrix: PackedMatrix, step: int = STEP) -> int:
    """Return the bytes of a warp's step of up to `step` bytes of codes, with scales of a block."""
    return step + BLOCK_PANELS * 4 * matrix.scale_words


def kinds_of(run: Sequence[Panel], step: int = STEP, most: int = BLOCK_PANELS) -> list[int]:
    """Return the steps of a run of panels, the last one marked: see `Step` in ring.cuh.

    step, most: bytes of codes, and panels, that a step has at most.
    """
    kinds, first = [], 0
    while first < len(run):
        bits, rest = run[first].bits, run[first].rest
        count = min(rest + 1, len(run) - first, step // (4 * LANES * bits), most)
        places = sum(panel.place << 2 * i for i, panel in enumerate(run[first : first + count]))
        block = (rest + 1 - count) << 16 | (run[first].groups - 1) << 18
        first += count
        kinds.append(bits | count << 4 | (first == len(run)) << 7 | places << 8 | block)
    return kinds
