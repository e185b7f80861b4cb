"""Repack a file's matrices on a GPU for the inference kernels, one launch each."""

from collections.abc import Sequence
from itertools import chain

import torch

from exl2flow.kernels.cuda.compiler import THREADS, launch
from exl2flow.kernels.interface.groups import Group
from exl2flow.kernels.interface.packed import LANES, TILE, panels_of
from exl2flow.kernels.streams import device_cache, device_table


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


@device_cache
def panel_table(groups: tuple[Group, ...], device: torch.device) -> tuple[torch.Tensor, int]:
    """Return bits, first word and group of every panel, int64 (panels, 3), and the word count."""
    panels = panels_of(groups, 1)
    table = device_table(tuple(chain.from_iterable(panels)), device).view(-1, 3)
    return table, sum(bits for bits, _, _ in panels)
