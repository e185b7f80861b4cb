"""Plans of products, and what CTAs and warps do by them: what `product.cu` would find."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from exl2flow.kernels import FusedLinear, Group, NormArgs, PackedMatrix
from exl2flow.kernels.interface.packed import SCALE_WORDS, ZERO_WORDS, laid_panels
from exl2flow.kernels.plans.product import LaunchPlan, plan_of
from exl2flow.kernels.plans.shares import HEADER, WARPS

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


def parallel(hidden: int, mlp: int, kv: int) -> list[FusedLinear]:
    """Return the products of a parallel block: q, k and v are beside gate and up, for one norm."""
    out, gated, down, inputs = chain(hidden, mlp, kv)
    beside = [replace(matrix, order=gated.order) for matrix in inputs.matrices]
    norm = NormArgs(weight=torch.randn(hidden).half(), eps=1e-5, centered=True)
    return [out, replace(gated, matrices=(*gated.matrices, *beside), norm=norm), down]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Products and their plan."""

    products: Sequence[FusedLinear]
    rows: int
    most_shared: int
    plan: LaunchPlan

    def product_of(self, index: int) -> int:
        """Return the product of a stage."""
        return next(i for i, own in enumerate(self.plan.stages) if index < own.stop)


def case_of(products: Sequence[FusedLinear], rows: int, device: tuple[int, int]) -> Case:
    plan = plan_of(products, rows, device)
    assert plan is not None
    return Case(products=products, rows=rows, most_shared=device[1], plan=plan)


class Work:
    """What a CTA has of a stage: see `Work` in work.cuh."""

    def __init__(self, stage: np.void, block: int) -> None:
        cta = block % stage["ctas"]
        self.part = block // stage["ctas"]
        self.together = 2 if stage["activation"] else 1
        self.which = max(i for i, of in enumerate(stage["of"]) if i == 0 or cta >= of["first_cta"])
        of = stage["of"][self.which]
        self.first = int(of["first_tile"] + (cta - of["first_cta"]) * of["each"])
        is_there = self.part < stage["parts"]
        held = max(0, min(int(of["each"]), int(of["tiles"]) - self.first))
        self.tiles = held * self.together * is_there
        self.each = int(of["each"])
        self.begin = self.part * int(stage["length"])  # panel

    def matrix_of(self, index: int) -> int:
        return self.which + (index % 2 if self.together == 2 else 0)

    def tile_of(self, index: int) -> int:
        return self.first + index // self.together

    def summed(self, index: int, share: list[int]) -> set[tuple[str, int]]:
        """Return which sums are those of a tile: see `Parts` and `finish`."""
        found = set()
        units = share[6 : 6 + self.together]
        begin = index // self.together * sum(units) + sum(units[: index % self.together])
        end, of_all = begin + units[index % self.together], self.each * sum(units)
        for warp in range(WARPS):
            own, stop = (of_all * w // WARPS for w in (warp, warp + 1))
            if max(own, begin) < min(stop, end):
                found.add(("ended", index) if stop > end else ("last", warp))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Panels that a warp multiplies together; bytes are those within a matrix's tile.

    index: the tile among those of the CTA; scales: bytes of each panel's group; sums: where those
    of the tile go.
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


def shares_of(case: Case, index: int) -> Iterator[tuple[int, Work, int, list[int]]]:
    """Yield CTA, its work, warp and share of all that have tiles of a stage."""
    stage = case.plan.argument["stages"][index]
    tables = {tensor.data_ptr(): tensor for tensor in case.plan.tensors}
    shares = [tables[of["shares"]].tolist() if of["shares"] else [] for of in stage["of"]]
    for block in range(case.plan.ctas):
        work = Work(stage, block)
        for warp in range(WARPS if work.tiles else 0):
            yield block, work, warp, shares[work.which][work.part * WARPS + warp]


def steps_of(case: Case, index: int) -> Iterator[Step]:
    """Yield what all warps do of a stage, in the order of CTAs, warps and time."""
    size = 4 * case.products[case.product_of(index)].matrices[0].scale_words
    for block, work, warp, share in shares_of(case, index):
        yield from warp_steps(work, share, size, block, warp)


def warp_steps(work: Work, share: list[int], size: int, block: int, warp: int) -> Iterator[Step]:
    first, segments, word, row, *begins = share[:6]
    kinds = iter(share[HEADER:])
    for index in range(first, first + min(segments, work.tiles - first)):
        of = work.matrix_of(index)
        at, panel = begins[of if work.together == 2 else 0], work.begin
        if index == first:
            at, panel = word, work.begin + row // 32
        for kind in kinds:
            bits, panels, rest = kind & 15, kind >> 4 & 7, kind >> 16 & 3
            scales = at + (panels + rest) * bits * 128
            yield Step(
                block=block,
                warp=warp,
                index=index,
                matrix=of,
                tile=work.tile_of(index),
                panel=panel,
                bits=bits,
                count=panels,
                codes=at,
                scales=[scales + size * (kind >> 8 + 2 * i & 3) for i in range(panels)],
                sums=("ended", index) if index + 1 < first + segments else ("last", warp),
            )
            at, panel = at + bits * panels * 128, panel + panels
            at += 0 if rest else size * ((kind >> 18 & 3) + 1)
            if kind >> 7 & 1:
                break


def stages(case: Case) -> Iterator[tuple[int, FusedLinear, np.void]]:
    entries = case.plan.argument["stages"]
    for product, of_product in zip(case.products, case.plan.stages, strict=True):
        for index in range(of_product.start, of_product.stop):
            yield index, product, entries[index]


def inputs(rows: int, k: int) -> torch.Tensor:
    return torch.zeros(rows, k, dtype=torch.float16)


def where(*tensors: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def names(launches: list) -> list[str | int]:
    """Return the steps by name, and the products by their number in a launch."""
    return [a if isinstance(a, str) else int(a["count"]) for a, _ in launches]
