"""Repack a file's matrices on a GPU for the inference kernels, one launch each."""

from collections.abc import Sequence

import torch

from exl2flow.kernels.cuda.compiler import THREADS, launch
from exl2flow.kernels.interface.groups import PANEL_ROWS, Group
from exl2flow.kernels.interface.packed import LANES, TILE
from exl2flow.kernels.streams import device_table, kept


def lay_out(
    words: torch.Tensor, groups: Sequence[Group], order: torch.Tensor | None = None
) -> torch.Tensor:
    """See `Ops.lay_out`."""
    n, device = words.shape[1], words.device
    table, _ = panel_table(tuple(groups), device)
    tiles, length = -(-n // TILE), sum(group.rows * group.bits for group in groups)
    codes = torch.empty(tiles, length, dtype=torch.int32, device=device)
    launch(
        "lay_out.cu",
        "lay_out",
        (tiles, -(-len(table) // (THREADS // LANES))),
        words.contiguous(),
        table,
        0 if order is None else order,
        codes,
        n,
        len(table),
        4 * length,
    )
    return codes


def lay_out_scales(words: torch.Tensor, max_scales: torch.Tensor) -> torch.Tensor:
    """See `Ops.lay_out_scales`."""
    groups, n = words.shape[0], 8 * words.shape[1]
    tiles = -(-n // TILE)
    scales = torch.empty(tiles, groups, 8, dtype=torch.int32, device=words.device)
    launch(
        "lay_out.cu",
        "lay_out_scales",
        (-(-scales.numel() // THREADS),),
        words.contiguous(),
        max_scales.contiguous(),
        scales,
        groups,
        words.shape[1],
        scales.numel(),
    )
    return scales


@kept
def panel_table(groups: tuple[Group, ...], device: torch.device) -> tuple[torch.Tensor, int]:
    """Return bits, first word and group of every panel, int64 (panels, 3), and the word count."""
    rows: list[tuple[int, int, int]] = []
    word = 0
    for index, group in enumerate(groups):
        for _ in range(group.rows // PANEL_ROWS):
            rows.append((group.bits, word, index))
            word += group.bits
    flat = tuple(value for row in rows for value in row)
    return device_table(flat, device).view(-1, 3), word
