"""Plans of products, and what CTAs and warps do by them: what `product.cu` would find."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from exl2flow.kernels import FusedLinear, Group, PackedMatrix
from exl2flow.kernels.interface.packed import SCALE_WORDS, ZERO_WORDS, laid_panels
from exl2flow.kernels.plans.product import LaunchPlan, plan_of
from exl2flow.kernels.plans.shares import WARPS

H200, A100, RTX_4090 = (132, 227 << 10), (108, 163 << 10), (128, 99 << 10)
DEVICES = (H200, A100, RTX_4090)  # multiprocessors, bytes of shared memory
Kind = tuple[int, int]  # bits and rows of groups


def matrix(k: int, columns: int, *kinds: Kind, zeros: bool = False) -> PackedMatrix:
    """Return a matrix without content; kinds of groups have equal shares of the rows."""
    groups: list[Group] = []
    while (start := sum(group.rows for group in groups)) < k:
        bits, rows = kinds[start * len(kinds) // k]
        groups.append(Group(bits=bits, start=start, rows=min(rows, k - start)))
    panels = laid_panels(tuple(groups), ZERO_WORDS if zeros else SCALE_WORDS)
    last = panels[-1]
    words = last.scales + last.groups * (ZERO_WORDS if zeros else SCALE_WORDS)
    return PackedMatrix(
        words=torch.empty(-(-columns // 32), words, dtype=torch.int32),
        groups=tuple(groups),
        order=torch.randperm(k),
        columns=columns,
        has_zeros=zeros,
    )


def product(
    *matrices: PackedMatrix, activation: str | None = None, adds: bool = False
) -> FusedLinear:
    return FusedLinear(matrices=matrices, activation=activation, adds=adds)


def chain(hidden: int, mlp: int, kv: int, *, zeros: bool = False) -> list[FusedLinear]:
    """Return the products from an attention's output to the next queries, keys and values."""

    def uniform(k: int, columns: int, bits: int = 4) -> PackedMatrix:
        return matrix(k, columns, (4 if zeros else bits, 128), zeros=zeros)

    return [
        product(uniform(hidden, hidden), adds=True),
        product(uniform(hidden, mlp), uniform(hidden, mlp, 3), activation="silu"),
        product(uniform(mlp, hidden, 5), adds=True),
        product(uniform(hidden, hidden), uniform(hidden, kv, 6), uniform(hidden, kv, 2)),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Products and their plan."""

    products: Sequence[FusedLinear]
    rows: int
    most_shared: int
    plan: LaunchPlan


def case_of(products: Sequence[FusedLinear], rows: int, device: tuple[int, int]) -> Case:
    plan = plan_of(products, rows, device)
    assert plan is not None
    return Case(products=products, rows=rows, most_shared=device[1], plan=plan)


class Work:
    """What a CTA has of a stage: see `Work` in work.cuh."""

    def __init__(self, stage: np.void, block: int, tables: dict[int, torch.Tensor]) -> None:
        self.part, cta = divmod(block, int(stage["ctas"]))
        self.together = 2 if stage["activation"] else 1
        self.which = max(i for i, of in enumerate(stage["of"]) if i == 0 or cta >= of["first_cta"])
        of = stage["of"][self.which]
        self.cta = cta - int(of["first_cta"])
        self.parts, self.pieces = int(stage["parts"]), int(of["pieces"])
        self.units, self.each = int(of["units"]), int(of["each"])
        every = int(of["tiles"]) * self.units if self.part < self.parts else 0
        begin = min(self.cta * self.each, every)
        end = min(begin + self.each, every)
        self.first, last = begin // self.units, end // self.units
        self.tiles = last - self.first
        self.held = self.tiles + (begin < end and end % self.units > 0)
        self.panel = self.part * int(stage["length"])
        self.list = tables[of["lists"]][min(self.part, self.parts - 1)].tolist()
        self.begin, self.end = (
            bound // self.units * self.list[0] + bound % self.units * self.list[0] // self.units
            for bound in (begin, end)
        )
        self.begun = max(self.begin, last * self.list[0])

    def others(self, tile: int) -> list[int]:
        """Return where the other CTAs' sums of a tile that it ends lie."""
        ctas = self.cta - tile * self.units // self.each + 1
        every = [(part, turn) for part in range(self.parts) for turn in range(ctas)]
        return [self.piece(tile, *place) for place in every[:-1]]

    def own_piece(self, tile: int) -> int:
        """Return where its sums of a tile lie that another CTA ends."""
        return self.piece(tile, self.part, self.cta - tile * self.units // self.each)

    def piece(self, tile: int, part: int, turn: int) -> int:
        return (tile * self.parts + part) * self.pieces + turn

    def ends(self, tile: int) -> bool:
        """Whether it adds up a tile."""
        return self.part + 1 == self.parts and tile < self.first + self.tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Panels that a warp multiplies together; bytes are those within a matrix's tile.

    index: the tile among those of the CTA; scales: bytes of each panel's group; sums: where those
    of the tile go; is_begun: whether another CTA ends the tile.
    """

    block: int
    warp: int
    index: int
    matrix: int
    tile: int
    panel: int
    bits: int
    count: int
    codes: int
    scales: list[int]
    sums: tuple[str, int]
    is_begun: bool


def works_of(case: Case, index: int) -> Iterator[tuple[int, Work]]:
    """Yield CTA and its work of all that have any of a stage."""
    stage = case.plan.argument["stages"][index]
    tables = {tensor.data_ptr(): tensor for tensor in case.plan.tensors}
    for block in range(case.plan.ctas):
        work = Work(stage, block, tables)
        if work.held:
            yield block, work


def steps_of(case: Case, index: int) -> Iterator[Step]:
    """Yield what all warps do of a stage, in the order of CTAs, warps and time."""
    size = 4 * case.products[index].matrices[0].scale_words
    for block, work in works_of(case, index):
        for warp in range(WARPS):
            yield from warp_steps(work, size, block, warp)


def bounds(work: Work, warp: int, *, is_begun: bool) -> tuple[int, int]:
    """Return a warp's steps of a run: see `Walk` in work.cuh."""
    every, rest = work.end - work.begin, work.end - work.begun
    before = [(warp + i) * every // WARPS for i in (0, 1)]
    of_rest = [own * rest // every if rest else 0 for own in before]
    if is_begun:
        return work.begun + of_rest[0], work.begun + of_rest[1]
    return work.begin + before[0] - of_rest[0], work.begin + before[1] - of_rest[1]


def warp_steps(work: Work, size: int, block: int, warp: int) -> Iterator[Step]:
    steps, of_first = work.list[:2]
    for is_begun in (True, False):
        places = bounds(work, warp, is_begun=is_begun)
        for place in range(*places):
            tile, at = divmod(place, steps)
            kind, where = work.list[2 + 2 * at : 4 + 2 * at]
            bits, panels, rest = kind & 15, kind >> 4 & 7, kind >> 16 & 3
            is_second, codes = at >= of_first, (where & 0xFFFFF) * 16
            assert (kind >> 7 & 1) == (at + 1 in (of_first, steps))
            scales = codes + (panels + rest) * bits * 128
            index = (tile - work.first) * work.together + is_second
            goes_on = kind >> 7 & 1 and place + 1 < places[1]
            last = index == (
                ((places[1] - 1) // steps - work.first) * work.together
                + ((places[1] - 1) % steps >= of_first)
            )
            assert not (last and goes_on)
            own = "begun" if is_begun else "last"
            yield Step(
                block=block,
                warp=warp,
                index=index,
                matrix=work.which + is_second,
                tile=tile,
                panel=work.panel + (where >> 20),
                bits=bits,
                count=panels,
                codes=codes,
                scales=[scales + size * (kind >> 8 + 2 * i & 3) for i in range(panels)],
                sums=(own, warp) if last else ("ended", index),
                is_begun=is_begun,
            )


def stages(case: Case) -> Iterator[tuple[int, FusedLinear, np.void]]:
    entries = case.plan.argument["stages"]
    for index, product in enumerate(case.products):
        yield index, product, entries[index]
