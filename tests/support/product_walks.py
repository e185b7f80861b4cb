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
        cta -= int(of["first_cta"])
        self.parts, self.pieces, ctas = int(stage["parts"]), int(of["pieces"]), int(of["ctas"])
        self.first = self.tiles = self.held = self.before = 0
        self.panel = self.part * int(stage["length"])
        self.shares: list[list[int]] = []
        self.list: list[tuple[int, int]] = []
        if self.part >= self.parts or cta >= ctas:
            return
        self.shares = tables[of["shares"]][self.part * ctas + cta].tolist()
        self.first, self.tiles, hands_over, self.before = self.shares.pop(0)
        self.held = self.tiles + hands_over
        entries = tables[of["lists"]][self.part].tolist()
        while entries and entries[0]:
            self.list.append((entries.pop(0), entries.pop(0)))
        self.of_first = next(i + 1 for i, (kind, _) in enumerate(self.list) if kind >> 7 & 1)

    def before_of(self, tile: int) -> int:
        return self.before if tile == self.first else 0

    def others(self, tile: int) -> list[int]:
        """Return where the other CTAs' sums of a tile that it ends lie."""
        turns = range(self.before_of(tile) + 1)
        return [self.piece(tile, part, turn) for part in range(self.parts) for turn in turns][:-1]

    def own_piece(self, tile: int) -> int:
        """Return where its sums of a tile lie that another CTA ends."""
        return self.piece(tile, self.part, self.before_of(tile))

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


def warp_steps(work: Work, size: int, block: int, warp: int) -> Iterator[Step]:
    share, steps = work.shares[warp], len(work.list)
    for is_begun, (where, left) in ((True, share[:2]), (False, share[2:])):
        first = (where >> 16) * steps + (where & 0x7FFF)
        assert not left or (where >> 15 & 1) == (first % steps >= work.of_first)
        for place in range(first, first + left):
            tile, at = divmod(place, steps)
            kind, where = work.list[at]
            bits, panels, rest = kind & 15, kind >> 4 & 7, kind >> 16 & 3
            is_second, codes = at >= work.of_first, (where & 0xFFFFF) * 16
            assert (kind >> 7 & 1) == (at + 1 in (work.of_first, steps))
            scales = codes + (panels + rest) * bits * 128
            index = (tile - work.first) * work.together + is_second
            end_tile, end_at = divmod(first + left - 1, steps)
            last = index == (end_tile - work.first) * work.together + (end_at >= work.of_first)
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
