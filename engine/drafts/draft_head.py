"""The head of a model over its likeliest ids: draft tokens need no others.

A head is copied by tiles of 32 ids. Ids that occur in a text are likely to occur again, so their
tiles are added as they appear; the oldest of these are replaced.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch.nn import functional

from exl2flow.kernels import FusedLinear, get_ops, on_device
from exl2flow.kernels.interface.packed import TILE
from exl2flow.model import DenseLinear, Linear
from exl2flow.model.config.mtp import DRAFT_TILES
from exl2flow.model.layers.decoder import Head
from exl2flow.model.layers.linear import PackedLinear, narrowed

LIKELIEST, OWN = DRAFT_TILES  # tiles of the likeliest ids, and of those of texts
LEAST = 2  # times as many tiles has a head of which a part is worth it


class DraftHead:
    """Proposes the likeliest of some ids.

    ids: int64 (tiles · 32,), of the columns of its copy.
    """

    def __init__(self, head: Head, counts: torch.Tensor | None = None) -> None:
        """Copy the tiles of the likeliest ids of a head.

        counts: how often each id occurred, (v,), on the host; None: lower ones are likelier.
        """
        self._whole = _tiles_of(head.linear)
        tiles = len(self._whole)
        device = self._whole.device
        sums = torch.zeros(tiles * TILE, dtype=torch.int64)
        if counts is not None:
            sums[: len(counts)] = counts[: len(sums)]
        order = sums.view(tiles, TILE).sum(dim=1).argsort(descending=True, stable=True)
        chosen = order[:LIKELIEST]
        self._always = {*chosen.tolist()}
        self._own = dict[int, int]()  # tile → its place, the one that came first first
        places = torch.cat([chosen, chosen[:1].expand(OWN)])  # which repeats a tile until then
        self._tiles = self._whole[places.to(device)]
        self.ids = (places[:, None] * TILE + torch.arange(TILE)).flatten().to(device)
        self._product = _product_of(head.linear, self._tiles)

    @staticmethod
    def is_worth_it(head: Head) -> bool:
        """Return whether drafting with a part of a head saves much."""
        linear = head.linear
        if not isinstance(linear, DenseLinear | PackedLinear) or linear.bias is not None:
            return False
        return len(_tiles_of(linear)) >= LEAST * (LIKELIEST + OWN)

    def add(self, ids: Iterable[int]) -> None:
        """Copy in the tiles of a text's ids, the last ones if there are too many."""
        count = len(self._whole)
        new = dict.fromkeys(tile for tile in (i // TILE for i in ids) if 0 <= tile < count)
        wanted = [tile for tile in new if tile not in self._always and tile not in self._own]
        if not wanted:
            return
        wanted = wanted[-OWN:]
        places = [LIKELIEST + i for i in range(len(self._own), OWN)][: len(wanted)]
        places += [self._own.pop(next(iter(self._own))) for _ in range(len(wanted) - len(places))]
        self._own |= zip(wanted, places, strict=True)
        device = self.ids.device
        tiles, rows = (on_device(torch.tensor(x), device) for x in (wanted, places))
        self._tiles.index_copy_(0, rows, self._whole[tiles])
        columns = tiles[:, None] * TILE + torch.arange(TILE, device=device)
        self.ids.view(-1, TILE).index_copy_(0, rows, columns)

    def likeliest(self, states: torch.Tensor) -> torch.Tensor:
        """Return the likeliest id int64 (n,) after each state (n, hidden) behind the final norm."""
        return self.ids[self._product(states).argmax(dim=-1)]


def _tiles_of(linear: Linear) -> torch.Tensor:
    """Return a head by tiles, (tiles, …): of packed words, or of rows of a dense weight."""
    if isinstance(linear, PackedLinear):
        return linear.matrix.words[: linear.matrix.columns // TILE]
    rows, columns = linear.weight.shape
    return linear.weight[: rows // TILE * TILE].reshape(-1, TILE, columns)


def _product_of(linear: Linear, tiles: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what multiplies states (n, hidden) with tiles of a head, (n, tiles · 32)."""
    if not isinstance(linear, PackedLinear):
        weight = tiles.flatten(0, 1)
        return lambda states: functional.linear(states.to(weight.dtype), weight)
    matrix = replace(linear.matrix, words=tiles, columns=len(tiles) * TILE)
    product = FusedLinear(matrices=(matrix,), exact=True)

    def multiply(states: torch.Tensor) -> torch.Tensor:
        [logits], _ = get_ops(states.device).multiply(narrowed(states), [product])
        return logits

    return multiply
