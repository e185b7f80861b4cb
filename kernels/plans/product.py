"""Launch plans of fused linears for batch size 1 to 4, which `csrc/product.cu` follows.

A CTA of 16 warps has some tiles of 32 columns and all their rows, or a part of the rows; its warps
share its panels equally. Products that each read the previous result are one launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from exl2flow.kernels.interface.activations import ACTIVATIONS
from exl2flow.kernels.interface.groups import PANEL_ROWS
from exl2flow.kernels.interface.packed import LANES, TILE, FusedLinear, PackedMatrix
from exl2flow.kernels.plans.shares import HEADER, STEP, WARPS, shares_of
from exl2flow.kernels.plans.sources import fill, filled, struct

ROWS = (1, 4)  # kernels, by the most rows of x
MOST_ROWS = ROWS[-1]
BATCHED_ROWS = (8, 16, 32)  # the same of `batched.cu`
X_PIECES = 2  # of a row that a thread holds, if its norm is added to hidden states
UNIT = 8  # bytes that belong to a panel of a row of x
LEAST_SLOTS, MOST_SLOTS = 2, 8  # steps that a warp has in flight, fewer if memory is small
SLOT = WARPS * (STEP + 8)  # bytes of one step of all warps, barriers included
FIXED_SHARED = 2 << 10  # bytes of a CTA's shared memory that the kernel keeps for itself
MOST_MATRICES = 3  # per product
MOST_TILES = 14  # per CTA, because it holds their sums
MOST_CHAINED = 4  # products per launch
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
    divisions = [
        _Division.of(product, count, processors)
        for product, count in zip(products, counts, strict=True)
    ]
    memory = _fit(products, rows, divisions, processors, most_shared - FIXED_SHARED)
    if memory is None:
        return None
    slots, shared = memory
    argument, tensors = _chain(products, rows, divisions, slots)
    return LaunchPlan(
        parts=tuple(division.parts for division in divisions),
        file="product.cu",
        name=instance_of("product", products, rows),
        ctas=max(division.ctas * division.parts for division in divisions),
        shared=shared,
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
        codes=matrix.codes,
        scales=matrix.scales,
        bias=0 if matrix.bias is None else matrix.bias,
        columns=matrix.columns,
        tiles=len(matrix.codes),
        tile_bytes=4 * matrix.codes.shape[1],
        scale_bytes=matrix.scale_bytes * len(matrix.groups),
        **fields,
    )


def padded_table(lists: Sequence[Sequence[int]], words: int, device: torch.device) -> torch.Tensor:
    """Return lists as int32 (lists, words), zeros after each."""
    table = [[*one, *[0] * (words - len(one))] for one in lists]
    return torch.tensor(table, dtype=torch.int32).to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Division:
    """Division of a product among CTAs.

    each: tiles of a CTA, for each set of matrices whose tiles alternate; shares: for each set,
    part and warp; length: panels of a part; ctas: of a part.
    """

    each: Sequence[int]
    shares: Sequence[Sequence[Sequence[Sequence[int]]]]
    length: int
    parts: int
    ctas: int
    tiles: int
    words: int
    scales: int

    @classmethod
    def of(cls, product: FusedLinear, parts: int | None, processors: int) -> "_Division":
        """Divide rows into parts; if `parts` is None, into several when tiles are few."""
        matrices = product.matrices
        sets = _sets(product)
        panels, tiles = len(matrices[0].panels()), [len(together[0].codes) for together in sets]
        if parts is None:
            parts = min(processors // sum(tiles), panels // (2 * WARPS))
        length = -(-panels // max(parts, 1))
        parts = -(-panels // length)
        each = _tiles_each(sets, tiles, processors / parts)
        shares = [
            [shares_of(together, e, part, length) for part in range(parts)]
            for together, e in zip(sets, each, strict=True)
        ]
        flat = [share for of_set in shares for part in of_set for share in part]
        groups = [sum(kind >> 16 for kind in share[HEADER:]) for share in flat]
        return cls(
            each=each,
            shares=shares,
            length=length,
            parts=parts,
            ctas=sum(-(-count // e) for count, e in zip(tiles, each, strict=True)),
            tiles=max(each) * len(sets[0]),
            words=max(map(len, flat)),
            scales=matrices[0].scale_bytes * max(groups),
        )

    def input_bytes(self, rows: int, panels: int) -> int:
        """Return the bytes of this many rows of x, later reused for a sum of each warp.

        panels: of x, if all of it is needed; else 0.
        """
        of_x = kernel_rows(rows) * (2 * PANEL_ROWS * max(panels, self.length) + UNIT * self.length)
        return max(of_x, 4 * WARPS * rows * TILE)


def _sets(product: FusedLinear) -> list[list[PackedMatrix]]:
    """Return the sets of matrices whose tiles alternate in a CTA."""
    matrices = list(product.matrices)
    return [matrices] if product.activation else [[matrix] for matrix in matrices]


def _fit(
    products: Sequence[FusedLinear],
    rows: int,
    divisions: list[_Division],
    processors: int,
    room: int,
) -> tuple[int, int] | None:
    """Divide products further, in place, until they fit; return slots, and bytes of shared memory.

    room: most of these bytes. None: they cannot fit, or too many CTAs have to wait for each other.
    """
    least = min(LEAST_SLOTS, room // (2 * SLOT))  # leaves at least half for the rest
    adding = [False, *(product.after is not None for product in products[:-1])]
    while True:
        ctas = max(division.ctas * division.parts for division in divisions)
        if len(products) > 1 and ctas > processors:  # CTAs that meet must be resident together
            return None
        inputs = [
            division.input_bytes(rows, product.matrices[0].shape[0] // PANEL_ROWS * adds)
            for division, product, adds in zip(divisions, products, adding, strict=True)
        ]
        sums = 4 * rows * TILE * max(division.tiles for division in divisions)
        of_warp = sum(division.scales + 4 * division.words for division in divisions)
        fixed = WARPS * of_warp + sums + max(inputs)
        slots = min(MOST_SLOTS, (room - fixed) // SLOT)
        if slots >= least:
            return slots, fixed + slots * SLOT
        largest = inputs.index(max(inputs))
        if divisions[largest].length == 1:
            return None
        panels = products[largest].matrices[0].shape[0] // PANEL_ROWS
        parts = -(-panels // (divisions[largest].length - 1))
        divisions[largest] = _Division.of(products[largest], parts, processors)


def _chain(
    products: Sequence[FusedLinear], rows: int, divisions: Sequence[_Division], slots: int
) -> tuple[np.void, list[torch.Tensor]]:
    """Return a `Chain` without inputs and results, and the tensors it points to."""
    argument = np.zeros(1, CHAIN)[0]
    stages, device = argument["stages"], products[0].matrices[0].codes.device
    tensors = fill(
        argument,
        meetings=torch.zeros(1, dtype=torch.int32, device=device),
        count=len(products),
        rows=rows,
        slots=slots,
        words=sum(division.words for division in divisions),
        scale_room=sum(division.scales for division in divisions),
        tiles=max(division.tiles for division in divisions),
    )
    share_at = scale_at = 0
    for index, (product, division) in enumerate(zip(products, divisions, strict=True)):
        entry = stages[index]
        tensors += _fill(entry, product, division, rows)
        filled(entry, share_at=share_at, scale_at=scale_at)
        share_at, scale_at = share_at + division.words, scale_at + division.scales
        if index:
            tensors += fill(stages[index - 1], to=torch.argsort(product.order).int())
            tensors += _fill_after(entry, products[index - 1], product)
    if not products[0].is_ordered:
        tensors += fill(stages[0], place=torch.argsort(products[0].order).int())
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
    device = product.matrices[0].codes.device
    entry["of"]["first_cta"] = NO_CTA
    entries, ctas = iter(entry["of"]), 0
    for together, each, of_set in zip(_sets(product), division.each, division.shares, strict=True):
        tiles = len(together[0].codes)
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
        ctas += -(-tiles // each)
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


def _tiles_each(
    sets: Sequence[Sequence[PackedMatrix]], tiles: Sequence[int], ctas: float
) -> list[int]:
    """Return the tiles per CTA of each set, giving each set CTAs in proportion to its bytes."""
    sizes = [sum(matrix.codes.numel() for matrix in together) for together in sets]
    most, tiles_each = MOST_TILES // len(sets[0]), []
    for count, size in zip(tiles, sizes, strict=True):
        share = max(1, int(ctas * size / sum(sizes) + 0.01))
        tiles_each.append(-(-count // (share * -(-count // (share * most)))))
    return tiles_each
