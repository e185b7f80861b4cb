"""Split-K among the warps of a CTA: equal shares of its blocks, in steps."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from exl2flow.kernels.interface.groups import PANEL_ROWS
from exl2flow.kernels.interface.packed import (
    BLOCK_PANELS,
    BLOCK_WORDS,
    LANES,
    SCALE_WORDS,
    PackedMatrix,
    Panel,
)
from exl2flow.kernels.plans.sources import struct

WARPS = 16  # per CTA
STEP = 4 * BLOCK_WORDS  # most bytes of codes that a warp fetches at once
COPIED_WORDS = 4  # of which steps say how many are copied
HEADER = struct("work.cuh", "Share").itemsize // 4 - 1  # ints before its steps


def slot_bytes(matrix: PackedMatrix, step: int = STEP) -> int:
    """Return the bytes of a warp's step of up to `step` bytes of codes, with scales of a block."""
    return step + BLOCK_PANELS * 4 * matrix.scale_words


def shares_of(
    together: Sequence[PackedMatrix], each: int, part: int, length: int, step: int = STEP
) -> list[tuple[int, ...]]:
    """Return each warp's share of a part of `length` panels: `Share` in work.cuh.

    Shares consist of whole blocks, unless there are fewer than warps; step: most bytes of codes.
    """
    of_part = [matrix.panels()[part * length : (part + 1) * length] for matrix in together]
    units = [_block_starts(panels) for panels in of_part]
    if each * sum(map(len, units)) < WARPS:
        units = [[*range(len(panels))] for panels in of_part]
    begins = [4 * panels[0].word for panels in (of_part[0], of_part[-1])]
    counts = [len(units[0]), len(units[-1])]
    first_units = [*accumulate((len(of) for of in units * each), initial=0)]
    shares = []
    for begin, end in pairwise(first_units[-1] * warp // WARPS for warp in range(WARPS + 1)):
        kinds: list[int] = []
        header: tuple[int, ...] = (0, 0, 0, 0)
        for tile, (unit, past) in enumerate(pairwise(first_units)):
            own, stop = max(begin, unit), min(end, past)
            if own >= stop:
                continue
            panels, starts = of_part[tile % len(together)], units[tile % len(together)]
            row = starts[own - unit]
            run = panels[row : starts[stop - unit] if stop < past else len(panels)]
            first = header if kinds else (tile, 0, 4 * run[0].word, row * PANEL_ROWS)
            header = (first[0], first[1] + 1, *first[2:])
            kinds += kinds_of(run, step, together[0].scale_words)
        shares.append((*header, *begins, *counts, *kinds))
    return shares


def kinds_of(run: Sequence[Panel], step: int = STEP, scale_words: int = SCALE_WORDS) -> list[int]:
    """Return the steps of a run of panels, the last one marked: see `Step` in ring.cuh.

    step: bytes of codes that a step has at most; scale_words: of a group in a tile.
    """
    kinds, first = [], 0
    while first < len(run):
        bits, rest = run[first].bits, run[first].rest
        count = min(rest + 1, len(run) - first, step // (4 * LANES * bits))
        places = sum(panel.place << 2 * i for i, panel in enumerate(run[first : first + count]))
        block = (rest + 1 - count) << 16 | (run[first].groups - 1) << 18
        if count == rest + 1:  # scales follow these codes
            copied = LANES * bits * count + scale_words * run[first].groups
            block |= copied // COPIED_WORDS << 20
        first += count
        kinds.append(bits | count << 4 | (first == len(run)) << 7 | places << 8 | block)
    return kinds


def _block_starts(panels: Sequence[Panel]) -> list[int]:
    """Return the panels of a part that begin a block, and the first one."""
    return [i for i in range(len(panels)) if i == 0 or not panels[i - 1].rest]
