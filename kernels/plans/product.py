"""Launch plans of fused linears for batch size 1 to 4, which `csrc/product.cu` follows.

A CTA of 16 warps has adjacent tiles of 32 columns with all their rows, or a part of the rows; it
may begin in one tile and end in another, and its warps share its steps equally. Products that each
read the previous result are one launch.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from exl2flow.kernels.interface.activations import ACTIVATIONS
from exl2flow.kernels.interface.groups import PANEL_ROWS
from exl2flow.kernels.interface.packed import (
    BLOCK_PANELS,
    LANES,
    TILE,
    FusedLinear,
    PackedMatrix,
    Panel,
)
from exl2flow.kernels.plans.shares import STEP, WARPS, kinds_of, slot_bytes
from exl2flow.kernels.plans.sources import fill, filled, struct

ROWS = (1, 4)  # kernels, by the most rows of x
MOST_ROWS = ROWS[-1]
BATCHED_ROWS = (8, 16, 32)  # the same of `batched.cu`
X_PIECES = 2  # of a row that a thread holds, if its norm is added to hidden states
UNIT = 8  # bytes that belong to a panel of a row of x
LEAST_SLOTS, MOST_SLOTS = 2, 8  # steps that a warp has in flight
STEPS = {1: (STEP,), 4: (STEP, STEP // 2)}  # bytes of codes of a step, the first that fits
FIXED_SHARED = 2 << 10  # bytes of a CTA's shared memory that the kernel keeps for itself
MOST_MATRICES = 3  # per product
MOST_TILES = 64  # per CTA, because it holds their sums
TURN_TILES = 32  # about so many, if CTAs take turns
MOST_CHAINED = 4  # products per launch
SHARED_BYTES = 8 << 10  # of codes, in whose time CTAs that share tiles exchange sums
OFFSET_UNIT = 16  # bytes
PANEL_SHIFT = 20  # of a step's panel above its place
NO_CTA = 1 << 30
CHAIN = struct("work.cuh", "Chain", MOST_MATRICES=MOST_MATRICES, MOST_CHAINED=MOST_CHAINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The launch of some products for a number of rows, without inputs and outputs.

    parts: into how many the rows of each product's matrices are divided; file, name: of the kernel;
    ctas, shared: the number of CTAs, and bytes of each; meets: whether CTAs wait for each other;
    adds_normed: whether a product whose result is normalized adds it to hidden states, and not the
    product behind it; argument: `CHAIN`; tensors: what it points to.
    """

    parts: tuple[int, ...]
    file: str
    name: str
    ctas: int
    shared: int
    meets: bool
    adds_normed: bool
    argument: np.void
    tensors: Sequence[torch.Tensor]


def kernel_rows(rows: int) -> int:
    """Return the row capacity of the kernel variant for `rows` rows."""
    return next(most for most in (*ROWS, *BATCHED_ROWS) if rows <= most)


def fuses_all(products: Sequence[FusedLinear], rows: int) -> bool:
    """Return whether one launch can run the whole chain at this batch size."""
    pairs = [*zip(products, [*products[1:], None], strict=True)]
    return all(
        not norms_apart(one) and not splits_epilogue(one, behind, rows) for one, behind in pairs
    )


def norms_apart(product: FusedLinear) -> bool:
    """Return whether the norm before a product needs a launch of its own."""
    return product.norm is not None and not product.norm.is_plain


def splits_epilogue(product: FusedLinear, following: FusedLinear | None, rows: int) -> bool:
    """Return whether part of the epilogue needs a launch of its own.

    A norm of the result is the work of the product behind it, for one row: each of its CTAs does
    it, so for two to four rows a launch is faster. More are batched: all CTAs do it together.
    """
    if product.activation is not None and not product.is_gated:
        return True
    if product.after is None:
        return False
    if following is None or norms_apart(following):
        return True
    if not (product.adds and product.after.is_plain):
        return True
    if rows > MOST_ROWS:
        return False
    return rows > 1 or len(following.order) > X_PIECES * 8 * WARPS * LANES


def plan_of(
    products: Sequence[FusedLinear],
    rows: int,
    limits: tuple[int, int],
    parts: Sequence[int] | None = None,
) -> LaunchPlan | None:
    """Divide products, each of which reads the previous one's result.

    Args:
        products: up to `MOST_CHAINED` that the kernel knows (`fuses_all`), matrices on the device,
            all EXL2 or all GPTQ.
        rows: rows of x, up to `MOST_ROWS`.
        limits: multiprocessors of the device, and bytes of shared memory that a CTA can have.
        parts: for each product, into how many its rows are divided; more if they do not fit.
            None: as few as fit, but more where there are fewer tiles than processors.

    Returns:
        The plan, or None if several products do not fit on the device together.
    """
    processors, most_shared = limits
    counts: Sequence[int | None] = [None] * len(products) if parts is None else parts
    fitting = _fit(products, rows, counts, processors, most_shared - FIXED_SHARED)
    if fitting is None:
        return None
    divisions, argument, tensors = fitting.divisions, *_chain(products, rows, fitting)
    return LaunchPlan(
        parts=tuple(division.parts for division in divisions),
        file="product.cu",
        name=instance_of("product", products, rows),
        ctas=max(division.ctas * division.parts for division in divisions),
        shared=fitting.shared,
        meets=len(products) > 1,
        adds_normed=False,
        argument=argument,
        tensors=tensors,
    )


def instance_of(kernel: str, products: Sequence[FusedLinear], rows: int) -> str:
    """Return the instance of a kernel's template for a number of rows of x."""
    has_zeros = products[0].matrices[0].has_zeros
    return f"{kernel}<{kernel_rows(rows)}, {str(has_zeros).lower()}>"


def fill_stage(
    entry: np.void, product: FusedLinear, **fields: torch.Tensor | float
) -> list[torch.Tensor]:
    """Fill fields of a `Stage` that both kernels have, and others; return the tensors."""
    activation = product.activation
    return fill(
        entry,
        k=len(product.order),
        activation=1 + list(ACTIVATIONS).index(activation) if activation else 0,
        multiplier=1.0 if product.after is not None else product.multiplier,
        **fields,
    )


def fill_matrix(
    entry: np.void, matrix: PackedMatrix, **fields: torch.Tensor | float
) -> list[torch.Tensor]:
    """Fill fields of a `Matrix` that both kernels have, and others; return the tensors."""
    return fill(
        entry,
        words=matrix.words,
        bias=0 if matrix.bias is None else matrix.bias,
        columns=matrix.columns,
        tile_bytes=4 * matrix.words.shape[1],
        **fields,
    )


def padded_table(lists: Sequence[Sequence[int]], words: int, device: torch.device) -> torch.Tensor:
    """Return lists as int32 (lists, words), zeros after each."""
    table = [[*one, *[0] * (words - len(one))] for one in lists]
    return torch.tensor(table, dtype=torch.int32).to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """Division of matrices whose tiles alternate among CTAs.

    tiles: their number; units: of work in a tile, in all parts; each: units of a CTA; lists: of
    each part, as work.cuh says.
    """

    tiles: int
    units: int
    each: int
    lists: Sequence[Sequence[int]]

    @property
    def ctas(self) -> int:
        """CTAs of a part."""
        return -(-self.tiles * self.units // self.each)

    @property
    def is_cut(self) -> bool:
        """Whether CTAs share tiles."""
        return self.each % self.units != 0 and self.ctas > 1

    @property
    def held(self) -> int:
        """Most tiles of a CTA."""
        first, last, _ = self._bounds()
        return int((last - first).max()) + 1

    @property
    def pieces(self) -> int:
        """Most CTAs of a part that share a tile."""
        begins = np.arange(self.tiles) * self.units
        return int(((begins + self.units - 1) // self.each - begins // self.each).max()) + 1

    def _bounds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the first tile, the last one, and the first unit of each CTA, int64."""
        begins = np.arange(self.ctas) * self.each
        ends = np.minimum(begins + self.each, self.tiles * self.units)
        return begins // self.units, (ends - 1) // self.units, begins

    def table(self) -> np.ndarray:
        """Return the shares of CTAs and their warps, int32 (parts · CTAs, 1 + warps, 4)."""
        return np.concatenate([self._of_part(len(own) // 2, own) for own in self.lists])

    def _of_part(self, steps: int, entries: Sequence[int]) -> np.ndarray:
        of_first = next(i + 1 for i, kind in enumerate(entries[::2]) if kind >> 7 & 1)
        first, _, begins = self._bounds()
        ends = np.minimum(begins + self.each, self.tiles * self.units)
        tiles = ends // self.units - first  # that a CTA ends
        begin, end = (
            at // self.units * steps + at % self.units * steps // self.units
            for at in (begins, ends)
        )
        begun = np.maximum(begin, ends // self.units * steps)
        before = np.arange(WARPS + 1) * (end - begin)[:, None] // WARPS
        of_begun = before * (end - begun)[:, None] // np.maximum(end - begin, 1)[:, None]
        table = np.zeros((self.ctas, 1 + WARPS, 4), dtype=np.int64)
        earlier = np.arange(self.ctas) - first * self.units // self.each
        table[:, 0] = np.stack([first, tiles, ends % self.units > 0, earlier], axis=1)
        for run, bounds in enumerate(
            (begun[:, None] + of_begun, begin[:, None] + before - of_begun)
        ):
            at = bounds[:, :-1] % steps
            table[:, 1:, 2 * run] = at | (at >= of_first) << 15 | bounds[:, :-1] // steps << 16
            table[:, 1:, 2 * run + 1] = np.diff(bounds)
        return table.astype(np.uint32).view(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Division:
    """Division of a product among CTAs.

    shares: of each set of matrices whose tiles alternate; together: their number in a set;
    length: panels of a part.
    """

    shares: Sequence[_Share]
    together: int
    length: int
    parts: int

    @property
    def ctas(self) -> int:
        """CTAs of a part."""
        return sum(share.ctas for share in self.shares)

    @property
    def tiles(self) -> int:
        """Most tiles whose sums a CTA holds."""
        return self.together * max(share.held for share in self.shares)

    @property
    def sums(self) -> int:
        """Most sums of tiles that a CTA holds, with one of each warp for a tile to hand over."""
        return self.tiles + WARPS * any(share.is_cut for share in self.shares)

    @property
    def words(self) -> int:
        """Entries of the longest list."""
        entries = max(len(of_part) for share in self.shares for of_part in share.lists) // 2
        return entries + entries % 2  # what follows begins at a multiple of 16 bytes

    @classmethod
    def of(
        cls, product: FusedLinear, parts: int | None, processors: int, *, step: int, meets: bool
    ) -> "_Division":
        """Divide rows into parts; if `parts` is None, into several when tiles are few.

        meets: no more CTAs than processors; else as many as its tiles need.
        """
        matrices, sets = product.matrices, _sets(product)
        panels, tiles = len(matrices[0].panels()), [len(together[0].words) for together in sets]
        if parts is None:
            parts = min(processors // sum(tiles), panels // (2 * WARPS))
        length = -(-panels // max(parts, 1))
        parts = -(-panels // length)
        held = sum(tiles) * len(sets[0]) * parts
        turns = 1 if meets else -(-held // (processors * TURN_TILES))
        ctas = max(processors * turns // parts, len(sets))
        sizes = [sum(matrix.words.shape[1] for matrix in together) * 4 / parts for together in sets]
        shares = []
        for together, count, each in zip(sets, tiles, _each(tiles, sizes, ctas), strict=True):
            of_parts = [
                tuple(m.panels()[part * length : (part + 1) * length] for m in together)
                for part in range(parts)
            ]
            lists = [_list(own, step, BLOCK_PANELS) for own in of_parts]
            if each * sum(map(len, lists)) < 2 * WARPS * parts:
                lists = [_list(own, step, 1) for own in of_parts]
            units = sum(map(len, lists)) // 2
            of_cta = max(1, _ceil(each * units))
            shares.append(_Share(tiles=count, units=units, each=of_cta, lists=lists))
        return cls(shares=shares, together=len(sets[0]), length=length, parts=parts)

    def input_bytes(self, rows: int, panels: int) -> int:
        """Return the bytes of this many rows of x, later reused for a sum of each warp.

        panels: of x, if all of it is needed; else 0.
        """
        of_x = kernel_rows(rows) * (2 * PANEL_ROWS * max(panels, self.length) + UNIT * self.length)
        return max(of_x, 4 * WARPS * rows * TILE)


def _each(tiles: Sequence[int], sizes: Sequence[float], ctas: int) -> list[float]:
    """Return the tiles of a CTA in each set: whole ones, unless sharing saves more than it costs.

    sizes: bytes of a tile of each set.
    """
    sets = [*zip(tiles, sizes, strict=True)]
    whole = sorted({size * each for count, size in sets for each in range(1, count + 1)})
    shared = sorted(
        {max(count * size / n, WARPS * STEP) for count, size in sets for n in range(1, ctas + 1)}
    )

    def least(bounds: Sequence[float], each: Callable[[float, float], float]) -> list[float]:
        """Return the tiles of CTAs whose busiest has the fewest bytes."""

        def fits(bound: float) -> bool:
            held = [each(bound, size) for _, size in sets]
            return min(held) > 0 and ctas >= sum(
                _ceil(count / own) for count, own in zip(tiles, held, strict=True)
            )

        bound = bounds[min(bisect_left(bounds, True, key=fits), len(bounds) - 1)]
        return [each(bound, size) for size in sizes]

    def busiest(held: Sequence[float]) -> float:
        return max(size * min(own, count) for own, (count, size) in zip(held, sets, strict=True))

    of_whole = least(whole, lambda bound, size: float(bound // size))
    of_shared = least(shared, lambda bound, size: bound / size)
    saved = busiest(of_whole) - busiest(of_shared)
    return of_shared if saved > SHARED_BYTES else of_whole


def _ceil(x: float) -> int:
    """Return the next integer, where x may be a rounding error above one."""
    return math.ceil(x - 1e-6)


@lru_cache(maxsize=256)
def _list(panels: tuple[tuple[Panel, ...], ...], step: int, most: int) -> tuple[int, ...]:
    """Return the list of a tile of each matrix of a set: as work.cuh says.

    panels: of a part, for each; step, most: bytes of codes and panels of a step.
    """
    entries = list[int]()
    for own in panels:
        index = 0
        for kind in kinds_of(own, step, most):
            entries += [kind, 4 * own[index].word // OFFSET_UNIT | index << PANEL_SHIFT]
            index += kind >> 4 & 7
    return tuple(entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitting:
    """Divisions that fit on a device; step: most bytes of codes; shared: bytes of a CTA."""

    divisions: Sequence[_Division]
    step: int
    slots: int
    shared: int


def _sets(product: FusedLinear) -> list[list[PackedMatrix]]:
    """Return the sets of matrices whose tiles alternate in a CTA."""
    matrices = list(product.matrices)
    return [matrices] if product.activation else [[matrix] for matrix in matrices]


def _fit(
    products: Sequence[FusedLinear],
    rows: int,
    parts: Sequence[int | None],
    processors: int,
    room: int,
) -> _Fitting | None:
    """Divide products into so many parts, or more until they fit.

    room: most bytes of shared memory. None: they cannot fit, or too many CTAs have to wait for each
    other.
    """
    meets, adding = len(products) > 1, [False, *(p.after is not None for p in products[:-1])]
    panels = [product.matrices[0].shape[0] // PANEL_ROWS for product in products]
    while True:
        for step in STEPS[kernel_rows(rows)]:
            divisions = [
                _Division.of(product, count, processors, step=step, meets=meets)
                for product, count in zip(products, parts, strict=True)
            ]
            ctas = max(division.ctas * division.parts for division in divisions)
            if (meets and ctas > processors) or max(d.tiles for d in divisions) > MOST_TILES:
                return None
            inputs = [
                division.input_bytes(rows, count * adds)
                for division, count, adds in zip(divisions, panels, adding, strict=True)
            ]
            sums = 4 * rows * TILE * max(division.sums for division in divisions)
            words = sum(division.words for division in divisions)
            slot = WARPS * (slot_bytes(products[0].matrices[0], step) + 8)
            shares = 16 * (1 + WARPS) * len(products)
            fixed = shares + 8 * words + sums + max(inputs)
            slots = min(MOST_SLOTS * STEP // step, (room - fixed) // slot)
            if slots * step >= LEAST_SLOTS * STEP or (step < STEP and slots >= LEAST_SLOTS):
                shared = fixed + slots * slot
                return _Fitting(divisions=divisions, step=step, slots=slots, shared=shared)
        largest = inputs.index(max(inputs))
        if divisions[largest].length == 1:
            return None
        counts = [division.parts for division in divisions]
        counts[largest] = -(-panels[largest] // (divisions[largest].length - 1))
        parts = counts


def _chain(
    products: Sequence[FusedLinear], rows: int, fitting: _Fitting
) -> tuple[np.void, list[torch.Tensor]]:
    """Return a `Chain` without inputs and results, and the tensors it points to."""
    divisions = fitting.divisions
    argument = np.zeros(1, CHAIN)[0]
    stages, device = argument["stages"], products[0].matrices[0].words.device
    tensors = fill(
        argument,
        meetings=torch.zeros(1, dtype=torch.int32, device=device),
        count=len(divisions),
        rows=rows,
        slots=fitting.slots,
        slot_bytes=slot_bytes(products[0].matrices[0], fitting.step),
        words=sum(division.words for division in divisions),
        tiles=max(division.sums for division in divisions),
    )
    list_at = 0
    for number, (product, division) in enumerate(zip(products, divisions, strict=True)):
        entry = stages[number]
        tensors += _fill(entry, product, division, rows)
        filled(entry, list_at=list_at)
        list_at += division.words
        if number:
            tensors += _fill_after(entry, products[number - 1], product)
        elif not product.is_ordered:
            tensors += fill(entry, place=torch.argsort(product.order).int())
        if number + 1 < len(products):
            tensors += fill(entry, to=torch.argsort(products[number + 1].order).int())
    return argument, tensors


def _fill(
    entry: np.void, product: FusedLinear, division: _Division, rows: int
) -> list[torch.Tensor]:
    """Fill a `Stage` except inputs and results; return the tensors it points to."""
    tensors = fill_stage(
        entry,
        product,
        length=division.length,
        ctas=division.ctas,
        parts=division.parts,
        words=division.words,
    )
    device = product.matrices[0].words.device
    entry["of"]["first_cta"] = NO_CTA
    entries, first_cta = iter(entry["of"]), 0
    for together, share in zip(_sets(product), division.shares, strict=True):
        is_shared = share.is_cut or division.parts > 1
        sums = share.tiles * division.parts * share.pieces * rows * TILE * is_shared
        lists = padded_table(share.lists, 2 * division.words, device)
        arrived = torch.zeros(share.tiles * rows, dtype=torch.int32, device=device)
        shares = torch.from_numpy(share.table()).to(device)
        for index, matrix in enumerate(together):
            tensors += fill_matrix(
                next(entries),
                matrix,
                lists=lists,
                partial=torch.empty(sums, device=device),
                shares=shares,
                arrived=arrived,
                tiles=share.tiles,
                ctas=share.ctas,
                pieces=share.pieces,
                first_cta=NO_CTA if index else first_cta,
            )
        first_cta += share.ctas
    if product.norm is not None:
        weight = product.norm.weight[product.order].contiguous()
        tensors += fill(entry, norm=weight, eps=product.norm.eps)
    return tensors


def _fill_after(entry: np.void, before: FusedLinear, product: FusedLinear) -> list[torch.Tensor]:
    """Fill what a `Stage` adds to hidden states; return the tensors it points to."""
    if before.after is None:
        return []
    order = product.order
    return fill(
        entry,
        after=before.after.weight[order].contiguous(),
        order=order.int(),
        place=torch.argsort(order).int(),
        after_eps=before.after.eps,
        after_multiplier=before.multiplier,
    )
