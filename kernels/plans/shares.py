"""Split-K among the warps of a CTA: equal shares of its panels, in steps."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import itemgetter

from exl2flow.kernels.interface.groups import PANEL_ROWS
from exl2flow.kernels.interface.packed import PackedMatrix
from exl2flow.kernels.plans.sources import struct

WARPS = 16  # per CTA
STEP = 2048  # bytes of codes that a warp fetches at once
MOST_PANELS = 4  # per step
HEADER = struct("work.cuh", "Share").itemsize // 4 - 1  # ints before its steps


def shares_of(
    together: Sequence[PackedMatrix], each: int, part: int, length: int
) -> list[tuple[int, ...]]:
    """Return each warp's share of a part of `length` panels: `Share` in work.cuh."""
    size = together[0].scale_bytes
    of_part = [matrix.panels()[part * length : (part + 1) * length] for matrix in together]
    held, tiles = len(of_part[0]), each * len(together)
    begins = [
        x
        for panels in (of_part[0], of_part[-1])
        for x in (4 * panels[0][1], size * panels[0][2], _groups(panels) * size)
    ]
    cuts = [held * tiles * warp // WARPS for warp in range(WARPS + 1)]
    shares = []
    for begin, end in pairwise(cuts):
        kinds: list[int] = []
        scales: list[int] = []  # bytes of each segment
        at = begin
        while at < end:
            tile, row = divmod(at, held)
            run = of_part[tile % len(together)][row : min(held, row + end - at)]
            kinds += kinds_of(run)
            scales.append(size * _groups(run))
            at += len(run)
        tile, row = divmod(begin, held)
        _, word, group = of_part[tile % len(together)][row] if scales else (0, 0, 0)
        header = (tile, len(scales), 4 * word, size * group, row * PANEL_ROWS)
        ends = (scales[0], scales[-1]) if scales else (0, 0)
        shares.append((*header, *ends, *begins, *kinds))
    return shares


def _groups(panels: Sequence[tuple[int, int, int]]) -> int:
    return panels[-1][2] + 1 - panels[0][2]


def kinds_of(run: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return the steps of a run of panels, the last one marked: see `Share` in work.cuh."""
    kinds, first = [], 0
    while first < len(run):
        bits, _, group = run[first]
        most = min(MOST_PANELS, STEP // (128 * bits))
        step = next([*same] for _, same in groupby(run[first : first + most], itemgetter(0)))
        first += len(step)
        is_end = first == len(run)
        of_panels = sum((of - group) << 2 * i for i, (_, _, of) in enumerate(step))
        ended = (run[-1][2] + 1 if is_end else run[first][2]) - group
        kinds.append(bits | len(step) << 4 | is_end << 7 | of_panels << 8 | ended << 16)
    return kinds
