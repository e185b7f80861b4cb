"""Launch plans of fused linears for batch size 1 to 4, which `csrc/product.cu` follows.

A CTA of 16 warps has some tiles of 32 columns and all their rows, or a part of the rows; its warps
share its panels equally. Products that each read the previous result are one launch.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from exl2flow.kernels.interface.activations import ACTIVATIONS
from exl2flow.kernels.interface.groups import PANEL_ROWS
from exl2flow.kernels.interface.packed import LANES, TILE, FusedLinear, PackedMatrix
from exl2flow.kernels.plans.shares import STEP, WARPS, shares_of, slot_bytes
from exl2flow.kernels.plans.sources import fill, filled, struct

ROWS = (1, 4)  # kernels, by the most rows of x
MOST_ROWS = ROWS[-1]
BATCHED_ROWS = (8, 16, 32, 64)  # the same of `batched.cu`
X_PIECES = 2  # of a row that a thread holds, if its norm is added to hidden states
UNIT = 8  # bytes that belong to a panel of a row of x
LEAST_SLOTS, MOST_SLOTS = 2, 8  # steps that a warp has in flight
STEPS = {1: (STEP,), 4: (STEP, STEP // 2)}  # bytes of codes of a step, the first that fits
FIXED_SHARED = 2 << 10  # bytes of a CTA's shared memory that the kernel keeps for itself
MOST_MATRICES = 3  # per product, or 2 and 3 beside them
MOST_TILES = 14  # per CTA, because it holds their sums
MOST_CHAINED = 4  # products per launch
MOST_STAGES = 8  # per launch; a product with more tiles than its CTAs hold has several
NO_CTA = 1 << 30
MOST_RANKS = 8  # that share a model on one host and add up results within a launch
CHAIN = struct(
    "product.cu",
    "Chain",
    MOST_MATRICES=MOST_MATRICES,
    MOST_STAGES=MOST_STAGES,
    MOST_RANKS=MOST_RANKS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The launch of some products for a number of rows, without inputs and outputs.

    parts: into how many the rows of each product's matrices are divided; stages: of each product:
    slices of those in `argument`; file, name: of the kernel;
    ctas, shared: the number of CTAs, and bytes of each; meets: whether CTAs wait for each other;
    adds_normed: whether a product whose result is normalized adds it to hidden states, and not the
    product behind it; argument: `CHAIN`; tensors: what it points to.
    """

    parts: tuple[int, ...]
    stages: tuple[slice, ...]
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
        not begins_apart(one, rows) and not splits_epilogue(one, behind, rows)
        for one, behind in pairs
    )


def begins_apart(product: FusedLinear, rows: int) -> bool:
    """Return whether a product's norm, or what is beside it, needs launches of its own."""
    norm = product.norm
    if rows <= MOST_ROWS:
        return bool(product.beside) or (norm is not None and not norm.is_plain)
    return norm is not None and (norm.bias is not None or norm.weight.dim() > 1)


def splits_epilogue(product: FusedLinear, following: FusedLinear | None, rows: int) -> bool:
    """Return whether part of the epilogue needs a launch of its own.

    A norm of the result is the work of the product behind it, for one row: each of its CTAs does
    it, so for two to four rows a launch is faster. More are batched: all CTAs do it together.
    """
    if product.activation is not None and not product.is_gated:
        return True
    if product.after is None:
        return False
    if following is None or (following.norm is not None and not following.norm.is_plain):
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
    lasts = [*accumulate((division.rounds for division in divisions), initial=0)]
    return LaunchPlan(
        parts=tuple(division.parts for division in divisions),
        stages=tuple(slice(begin, end) for begin, end in pairwise(lasts)),
        file="product.cu",
        name=instance_of("product", products, rows),
        ctas=max(division.ctas * division.parts for division in divisions),
        shared=fitting.shared,
        meets=_meets(products),
        adds_normed=False,
        argument=argument,
        tensors=tensors,
    )


def instance_of(kernel: str, products: Sequence[FusedLinear], rows: int) -> str:
    """Return the instance of a kernel's template for a number of rows of x."""
    has_zeros = products[0].matrices[0].has_zeros
    exchanges = any(p.boxes is not None or p.gathers is not None for p in products)
    more = ", true" if exchanges else ""
    return f"{kernel}<{kernel_rows(rows)}, {str(has_zeros).lower()}{more}>"


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
        exchanges=product.boxes is not None,
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
class _Division:
    """Division of a product among CTAs.

    each: tiles of a CTA in a round, for each set of matrices whose tiles alternate; shares: for
    each set, part and warp; length: panels of a part; ctas: of a part; tiles: most of a CTA.
    """

    each: Sequence[int]
    rounds: int
    shares: Sequence[Sequence[Sequence[Sequence[int]]]]
    length: int
    parts: int
    ctas: int
    tiles: int
    words: int

    @classmethod
    def of(
        cls, product: FusedLinear, parts: int | None, processors: int, *, step: int, in_rounds: bool
    ) -> "_Division":
        """Divide rows into parts; if `parts` is None, into several when tiles are few.

        in_rounds: no more CTAs than processors; else as many as its tiles need.
        """
        matrices = product.matrices
        sets = _sets(product)
        panels, tiles = len(matrices[0].panels()), [len(together[0].words) for together in sets]
        if parts is None:
            parts = min(processors // sum(tiles), panels // (2 * WARPS))
        length = -(-panels // max(parts, 1))
        parts = -(-panels // length)
        each, rounds = _tiles_each(sets, tiles, processors // parts)
        shares = [
            [shares_of(together, e, part, length, step) for part in range(parts)]
            for together, e in zip(sets, each, strict=True)
        ]
        rounds = rounds if in_rounds else 1
        return cls(
            each=each,
            rounds=rounds,
            shares=shares,
            length=length,
            parts=parts,
            ctas=sum(-(-count // (rounds * e)) for count, e in zip(tiles, each, strict=True)),
            tiles=max(each) * len(sets[0]),
            words=max(len(share) for of_set in shares for part in of_set for share in part),
        )

    def input_bytes(self, rows: int, panels: int) -> int:
        """Return the bytes of this many rows of x, later reused for a sum of each warp.

        panels: of x, if all of it is needed; else 0.
        """
        of_x = kernel_rows(rows) * (2 * PANEL_ROWS * max(panels, self.length) + UNIT * self.length)
        return max(of_x, 4 * WARPS * rows * TILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitting:
    """Divisions that fit on a device; step: most bytes of codes; shared: bytes of a CTA."""

    divisions: Sequence[_Division]
    step: int
    slots: int
    shared: int


def _meets(products: Sequence[FusedLinear]) -> bool:
    """Return whether CTAs of a launch wait for each other."""
    return len(products) > 1


def _waits(products: Sequence[FusedLinear]) -> bool:
    """Return whether CTAs of a launch wait for others, of this GPU or another."""
    return _meets(products) or products[0].gathers is not None


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
    """Divide products into a number of parts, or more until they fit.

    room: most bytes of shared memory. None: they cannot fit, or too many CTAs have to wait for each
    other.
    """
    waits, adding = _waits(products), [False, *(p.after is not None for p in products[:-1])]
    panels = [product.matrices[0].shape[0] // PANEL_ROWS for product in products]
    while True:
        for step in STEPS[kernel_rows(rows)]:
            divisions = [
                _Division.of(product, count, processors, step=step, in_rounds=waits)
                for product, count in zip(products, parts, strict=True)
            ]
            ctas = max(division.ctas * division.parts for division in divisions)
            is_resident = ctas <= processors and sum(d.rounds for d in divisions) <= MOST_STAGES
            if waits and not is_resident:
                return None
            inputs = [
                division.input_bytes(rows, count * adds)
                for division, count, adds in zip(divisions, panels, adding, strict=True)
            ]
            sums = 4 * rows * TILE * max(division.tiles for division in divisions)
            words = sum(division.words for division in divisions)
            slot = WARPS * (slot_bytes(products[0].matrices[0], step) + 8)
            fixed = WARPS * 4 * words + sums + max(inputs)
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
        count=sum(division.rounds for division in divisions),
        rows=rows,
        slots=fitting.slots,
        slot_bytes=slot_bytes(products[0].matrices[0], fitting.step),
        words=sum(division.words for division in divisions),
        tiles=max(division.tiles for division in divisions),
    )
    filled(argument["gather"], sums=any(product.boxes is not None for product in products))
    index = share_at = 0
    for number, (product, division) in enumerate(zip(products, divisions, strict=True)):
        entry = stages[index]
        tensors += _fill(entry, product, division, rows)
        filled(entry, share_at=share_at)
        if number:
            tensors += _fill_after(entry, products[number - 1], product)
        elif not product.is_ordered or product.gathers is not None:
            tensors += fill(entry, place=torch.argsort(product.order).int())
        if number + 1 < len(products):
            tensors += fill(entry, to=torch.argsort(products[number + 1].order).int())
        past = index + division.rounds
        _cover(stages[index:past], product, division)
        index, share_at = past, share_at + division.words
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
    entries, ctas = iter(entry["of"]), 0
    for together, each, of_set in zip(_sets(product), division.each, division.shares, strict=True):
        tiles = len(together[0].words)
        flat = [share for part in of_set for share in part]
        shares = padded_table(flat, division.words, device)
        sums = tiles * division.parts * rows * TILE if division.parts > 1 else 0
        for index, matrix in enumerate(together):
            tensors += fill_matrix(
                next(entries),
                matrix,
                shares=shares,
                partial=torch.empty(sums, device=device),
                arrived=torch.zeros(division.ctas, dtype=torch.int32, device=device),
                each=each,
                first_cta=NO_CTA if index else ctas,
            )
        ctas += -(-tiles // (division.rounds * each))
    if product.norm is not None:
        weight = product.norm.weight[product.order].contiguous()
        tensors += fill(entry, norm=weight, eps=product.norm.eps)
    return tensors


def _cover(stages: np.ndarray, product: FusedLinear, division: _Division) -> None:
    """Make the rounds of a product of its first `Stage`, each with its tiles of all matrices."""
    stages[1:] = stages[0]
    index = 0
    for together, each in zip(_sets(product), division.each, strict=True):
        tiles = len(together[0].words)
        of_round = -(-tiles // (division.rounds * each)) * each
        for _ in together:
            of = stages["of"][:, index]
            of["first_tile"] = [min(tiles, turn * of_round) for turn in range(len(stages))]
            of["tiles"] = [min(tiles, (turn + 1) * of_round) for turn in range(len(stages))]
            index += 1


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


def _tiles_each(
    sets: Sequence[Sequence[PackedMatrix]], tiles: Sequence[int], ctas: int
) -> tuple[list[int], int]:
    """Return the tiles per CTA and round of each set, and the number of rounds.

    The busiest CTA has as few bytes as possible.
    """
    sizes = [sum(matrix.words.shape[1] for matrix in together) for together in sets]
    bounds = sorted(
        {
            size * each
            for count, size in zip(tiles, sizes, strict=True)
            for each in range(1, count + 1)
        }
    )

    def held(bound: int) -> list[int]:
        return [min(bound // size, count) for count, size in zip(tiles, sizes, strict=True)]

    def fits(bound: int) -> bool:
        each = held(bound)
        return min(each) > 0 and ctas >= sum(
            -(-count // own) for count, own in zip(tiles, each, strict=True)
        )

    each = held(bounds[min(bisect_left(bounds, True, key=fits), len(bounds) - 1)])
    rounds = max(-(-own // (MOST_TILES // len(sets[0]))) for own in each)
    return [-(-own // rounds) for own in each], rounds
