"""Repack a file's matrices on a GPU for the inference kernels, one launch each."""

from collections.abc import Sequence
from itertools import accumulate, chain

import torch

from exl2flow.kernels.cuda.compiler import THREADS, launch
from exl2flow.kernels.interface.groups import Group
from exl2flow.kernels.interface.packed import LANES, SCALE_WORDS, TILE, laid_panels, scale_places
from exl2flow.kernels.streams import device_cache, device_table


def lay_out(
    words: torch.Tensor,
    groups: Sequence[Group],
    scales: torch.Tensor,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Ops.lay_out`."""
    n, device, own, groups = words.shape[1], words.device, scales.flatten(2), tuple(groups)
    table = laid_table(groups, own.shape[2], device)
    places, of_group = scale_places(groups, own.shape[2], device)
    length = sum(group.rows * group.bits for group in groups) + places.numel()
    laid = torch.empty(len(own), length, dtype=torch.int32, device=device)
    launch(
        "lay_out.cu",
        "lay_out",
        (len(own), -(-len(table) // (THREADS // LANES))),
        *(words.contiguous(), table, 0 if order is None else order, laid),
        *(n, len(table), 4 * length),
    )
    laid[:, places] = own[:, of_group]
    return laid


def lay_out_scales(words: torch.Tensor, max_scales: torch.Tensor) -> torch.Tensor:
    """See `Ops.lay_out_scales`."""
    groups, n = words.shape[0], 8 * words.shape[1]
    tiles = -(-n // TILE)
    scales = torch.empty(tiles, groups, 8, dtype=torch.int32, device=words.device)
    launch(
        "lay_out.cu",
        "lay_out_scales",
        (-(-scales.numel() // THREADS),),
        *(words.contiguous(), max_scales.contiguous(), scales),
        *(groups, words.shape[1], scales.numel()),
    )
    return scales


@device_cache
def panel_table(groups: tuple[Group, ...], device: torch.device) -> tuple[torch.Tensor, int]:
    """Return bits, first word and group of a file's panels, int64 (panels, 3), and all words."""
    panels = laid_panels(groups, SCALE_WORDS)
    begins = [*accumulate((panel.bits for panel in panels), initial=0)]
    values = [(p.bits, begin, p.group) for p, begin in zip(panels, begins, strict=False)]
    return device_table(tuple(chain.from_iterable(values)), device).view(-1, 3), begins[-1]


@device_cache
def laid_table(groups: tuple[Group, ...], scale_words: int, device: torch.device) -> torch.Tensor:
    """Return where laid out panels are, int64 (panels, 4).

    The columns: bits; first word in the file; bytes from the begin of a tile to codes; to scales.
    """
    panels = laid_panels(groups, scale_words)
    begins = accumulate((panel.bits for panel in panels), initial=0)
    values = [
        (panel.bits, begin, 4 * panel.word, 4 * (panel.scales + scale_words * panel.place))
        for panel, begin in zip(panels, begins, strict=False)
    ]
    return device_table(tuple(chain.from_iterable(values)), device).view(-1, 4)
