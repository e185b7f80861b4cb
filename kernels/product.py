"""How a product of few rows with a packed matrix is divided: what `cuda/product.cu` is told.

A CTA of 16 warps has some tiles of 32 columns and all their rows, or a part of them. Up to 8 rows
of x, its warps divide the rows of one tile at a time; up to 16, four warps those of four tiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from exl2flow.kernels.groups import PANEL_ROWS
from exl2flow.kernels.packed import LANES, TILE, PackedMatrix

WARPS = 16
STEP = 2048  # bytes of codes that a warp fetches together
MOST_STEPS = 32  # of a warp in a tile
MOST_PANELS = 4  # of a step
ROWS = 8  # of x that a tensor core takes together
MANY_SHARED = 160 << 10  # bytes of shared memory of a CTA from which on it has three stages
MOST_MATRICES = 3  # of a launch
NO_CTA = 1 << 30
MATRIX = np.dtype(
    [
        (name, np.uint64)
        for name in ("codes", "scales", "steps", "bounds", "x", "y", "partial", "arrived")
    ]
    + [
        (name, np.int32)
        for name in (
            *("k", "rows", "columns", "tiles", "tile_bytes", "groups", "each", "length"),
            "first_cta",
        )
    ],
    align=True,
)
MATRICES = np.dtype([("of", MATRIX, MOST_MATRICES)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A product with so many rows, but for x and y.

    name: of the kernel; grid: its CTAs; shared: bytes of each; argument: `MATRICES`;
    kept: what it points to, steps, bounds, partial sums and counters of each matrix.
    """

    name: str
    grid: tuple[int, int]
    shared: int
    argument: np.void
    kept: Sequence[tuple[torch.Tensor, ...]]


def most_rows(most_shared: int, *, has_zeros: bool) -> int:
    """Return how many rows of x a launch may have on a device with so much shared memory."""
    if most_shared >= MANY_SHARED:
        return 2 * ROWS
    return ROWS // 4 if has_zeros else ROWS // 2  # stages, sums and x lie there


def plan_of(
    matrices: Sequence[PackedMatrix], rows: int, *, processors: int, most_shared: int
) -> Plan:
    """Divide a product.

    Args:
        matrices: on the device, all EXL2 or all GPTQ, with as many rows; up to `MOST_MATRICES`.
        rows: of x, up to `most_rows`.
        processors: multiprocessors of the device.
        most_shared: bytes of shared memory that a CTA can have.
    """
    (k, _), has_zeros = matrices[0].shape, matrices[0].has_zeros
    panels = k // PANEL_ROWS
    stages, row_warps = (3 if most_shared >= MANY_SHARED else 2), (WARPS if rows <= ROWS else 4)
    together = WARPS // row_warps  # tiles of a CTA
    fixed = WARPS * stages * (STEP + MOST_PANELS * matrices[0].scale_bytes)
    fixed += 16 * row_warps * MOST_STEPS + 2 * 4 * WARPS * TILE * min(rows, ROWS)
    held = 2 * (rows if rows <= ROWS else 2 * ROWS)  # bytes of x per row of the matrix
    most_length = (most_shared - fixed - held * PANEL_ROWS) // (held * PANEL_ROWS)
    wide = [-(-len(matrix.codes) // together) for matrix in matrices]
    useful = min(processors // sum(wide), panels // (2 * row_warps))
    parts = max(-(-panels // most_length), useful, 1)
    while True:
        length = -(-panels // parts)
        steps = [_steps(matrix, length, row_warps) for matrix in matrices]
        if max(len(w) for of_matrix in steps for part in of_matrix for w in part) <= MOST_STEPS:
            break
        parts += 1
    parts, rounded = len(steps[0]), -(-rows // ROWS) * ROWS
    sizes = [matrix.codes.numel() for matrix in matrices]
    argument, kept, ctas = np.zeros(1, MATRICES)[0], [], 0
    argument["of"]["first_cta"] = NO_CTA
    for index, matrix in enumerate(matrices):
        share = processors * sizes[index] / sum(sizes) / parts
        each = -(-wide[index] // max(1, round(share)))
        device, places = matrix.codes.device, wide[index] * WARPS
        sums = wide[index] * parts * rounded * together * TILE if parts > 1 else 0
        own = (
            *_tables(steps[index], device),
            torch.empty(sums, device=device),
            torch.zeros(places, dtype=torch.int32, device=device),
        )
        steps_of, bounds, partial, arrived = own
        filled(
            argument["of"][index],
            codes=matrix.codes, scales=matrix.scales, steps=steps_of, bounds=bounds,
            partial=partial, arrived=arrived, k=k, rows=rows, columns=matrix.columns,
            tiles=len(matrix.codes), tile_bytes=4 * matrix.codes.shape[1],
            groups=len(matrix.groups), each=each, length=length, first_cta=ctas,
        )  # fmt: skip
        kept.append((*own, matrix.codes, matrix.scales))
        ctas += -(-wide[index] // each)
    stride = length * PANEL_ROWS + (0 if length % 2 else PANEL_ROWS)
    return Plan(
        name=f"{'gptq' if has_zeros else 'exl2'}_{rounded}_{stages}",
        grid=(ctas, parts),
        shared=fixed + held * stride,
        argument=argument,
        kept=kept,
    )


def filled(entry: np.void, **values: torch.Tensor | float) -> np.void:
    """Set fields of a kernel's struct: to numbers, or to where contiguous tensors lie."""
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            assert value.is_contiguous(), f"{name} is not contiguous"
            value = value.data_ptr()
        entry[name] = value
    return entry


def _steps(
    matrix: PackedMatrix, length: int, warps: int
) -> list[list[list[tuple[int, int, int, int]]]]:
    """Return, of each part of so many panels, what each warp fetches in turn."""
    panels = matrix.panels()
    parts = []
    for begin in range(0, len(panels), length):
        count = min(length, len(panels) - begin)
        cuts = [begin + count * warp // warps for warp in range(warps + 1)]
        parts.append(
            [
                _of_warp(panels, first, stop, begin, matrix.scale_bytes)
                for first, stop in pairwise(cuts)
            ]
        )
    return parts


def _of_warp(
    panels: tuple[tuple[int, int, int], ...], first: int, stop: int, begin: int, scale_bytes: int
) -> list[tuple[int, int, int, int]]:
    """Return steps (codes, scales, row, kind; see `Step` in product.cu) of panels in a row."""
    steps = []
    while first < stop:
        bits, word, group = panels[first]
        most = min(MOST_PANELS, STEP // (4 * LANES * bits), stop - first)
        lengths: list[int] = []  # of groups that begin here, as far as they can be one step
        for of_bits, _, of_group in panels[first : first + most]:
            if of_bits != bits:
                break
            if len(lengths) == of_group - group:
                lengths.append(0)
            lengths[-1] += 1
        equal = next((i for i, x in enumerate(lengths) if x != lengths[0]), len(lengths))
        count = equal * lengths[0]
        kind = bits | count << 4 | lengths[0] << 8 | 8 * bits * count << 12
        kind |= equal * scale_bytes // 16 << 20
        steps.append((4 * word, group * scale_bytes, (first - begin) * PANEL_ROWS, kind))
        first += count
    return steps


def _tables(
    steps: list[list[list[tuple[int, int, int, int]]]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all steps int32 (s, 4), and bounds int32 (parts, warps + 1) into them."""
    flat: list[tuple[int, int, int, int]] = []
    bounds = []
    for part in steps:
        bounds.append([len(flat)])
        for of_warp in part:
            flat += of_warp
            bounds[-1].append(len(flat))
    table = torch.tensor(flat, dtype=torch.int32)
    return table.to(device), torch.tensor(bounds, dtype=torch.int32).to(device)
