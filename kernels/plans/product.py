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
from exl2flow.kernels.plans.shares import STEP, WARPS, scale_bytes, shares_of

ROWS = (1, 4)  # kernels, by the most rows of x
MOST_ROWS = ROWS[-1]
X_PIECES = 2  # of a row that a thread holds, if its norm is added to hidden states
UNIT = 8  # bytes that belong to a panel of a row of x
LEAST_SLOTS, MOST_SLOTS = 2, 8  # steps that a warp has in flight, fewer if memory is small
SLOT = WARPS * (STEP + 8)  # bytes of one step of all warps, barriers included
FIXED_SHARED = 2 << 10  # bytes of a CTA's shared memory that the kernel keeps for itself
MOST_MATRICES = 3  # per product
MOST_TILES = 14  # per CTA, because it holds their sums
MOST_CHAINED = 4  # products per launch
NO_CTA = 1 << 30
MATRIX = np.dtype(
    [
        (name, np.uint64)
        for name in (
            "codes",
            "scales",
            "shares",
            "bias",
            "residual",
            "y",
            "exact",
            "copy",
            "partial",
            "arrived",
        )
    ]
    + [
        (name, np.int32)
        for name in ("columns", "tiles", "tile_bytes", "scale_bytes", "each", "first_cta")
    ],
    align=True,
)
STAGE = np.dtype(
    [("of", MATRIX, MOST_MATRICES)]
    + [
        (name, np.uint64)
        for name in ("x", "norm", "place", "to", "after", "order", "hidden", "sum")
    ]
    + [
        (name, np.int32)
        for name in (
            "k",
            "length",
            "ctas",
            "parts",
            "words",
            "share_at",
            "scale_at",
            "activation",
        )
    ]
    + [(name, np.float32) for name in ("eps", "multiplier", "after_eps", "after_multiplier")],
    align=True,
)
CHAIN = np.dtype(
    [("stages", STAGE, MOST_CHAINED), ("meetings", np.uint64)]
    + [(name, np.int32) for name in ("count", "rows", "slots", "words", "scale_room", "tiles")],
    align=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The launch of some products for a number of rows, without inputs and outputs.

    parts: into how many the rows of each product's matrices are divided; file, name: of the kernel;
    ctas, shared: the number of CTAs, and bytes of each; meets: whether CTAs wait for each other;
    adds_normed: whether a product whose result is normalized adds it to hidden states, and not the
    product behind it; argument: `CHAIN`; kept: what it points to.
    """

    parts: tuple[int, ...]
    file: str
    name: str
    ctas: int
    shared: int
    meets: bool
    adds_normed: bool
    argument: np.void
    kept: Sequence[torch.Tensor]


def kernel_rows(rows: int) -> int:
    """Return the row capacity of the kernel variant for `rows` rows."""
    return next(most for most in ROWS if rows <= most)


def fuses_all(products: Sequence[FusedLinear], rows: int) -> bool:
    """Return whether one launch can run the whole chain at this batch size."""
    pairs = [*zip(products, [*products[1:], None], strict=True)]
    return all(
        not norms_apart(one) and not splits_epilogue(one, behind, rows) for one, behind in pairs
    )


def norms_apart(product: FusedLinear) -> bool:
    """Return whether the norm before a product is not the kernel's work."""
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
    *,
    processors: int,
    most_shared: int,
    parts: Sequence[int] | None = None,
) -> LaunchPlan | None:
    """Divide products, each of which reads the previous one's result.

    Args:
        products: up to `MOST_CHAINED` that the kernel knows (`fuses_all`), matrices on the device,
            all EXL2 or all GPTQ.
        rows: rows of x, up to `MOST_ROWS`.
        processors: multiprocessors of the device.
        most_shared: bytes of shared memory that a CTA can have.
            parts: for each product, into how many its rows are divided; more if they do not fit.
                None: as few as fit, but more where there are fewer tiles than processors.

    Returns:
        The plan, or None if several products do not fit on the device together.
    """
    room = most_shared - FIXED_SHARED
    least = min(LEAST_SLOTS, room // (2 * SLOT))  # leaves at least half for the rest
    counts: Sequence[int | None] = [None] * len(products) if parts is None else parts
    divisions = [
        _Division.of(product, count, processors)
        for product, count in zip(products, counts, strict=True)
    ]
    while True:
        ctas = max(division.ctas * division.parts for division in divisions)
        if len(products) > 1 and ctas > processors:  # CTAs that meet must be resident together
            return None
        inputs = [
            division.input_bytes(rows, product.matrices[0].shape[0] // PANEL_ROWS * adds)
            for division, product, adds in zip(divisions, products, _add(products), strict=True)
        ]
        words, scale_room = (sum(d.words for d in divisions), sum(d.scales for d in divisions))
        tiles = max(division.tiles for division in divisions)
        fixed = WARPS * (scale_room + 4 * words) + 4 * rows * TILE * tiles + max(inputs)
        slots = min(MOST_SLOTS, (room - fixed) // SLOT)
        if slots >= least:
            break
        largest = inputs.index(max(inputs))
        if divisions[largest].length == 1:
            return None
        divisions[largest] = divisions[largest].shorter(products[largest], processors)
    device = products[0].matrices[0].codes.device
    argument, kept = np.zeros(1, CHAIN)[0], [torch.zeros(1, dtype=torch.int32, device=device)]
    filled(
        argument,
        meetings=kept[0],
        count=len(products),
        rows=rows,
        slots=slots,
        words=words,
        scale_room=scale_room,
        tiles=tiles,
    )
    share_at = scale_at = 0
    for index, (product, division) in enumerate(zip(products, divisions, strict=True)):
        following = products[index + 1] if index + 1 < len(products) else None
        entry = argument["stages"][index]
        kept += _fill(entry, product, division, following, rows, device)
        if index:
            kept += _fill_after(entry, products[index - 1], product)
        filled(entry, share_at=share_at, scale_at=scale_at)
        share_at, scale_at = share_at + division.words, scale_at + division.scales
    place = torch.argsort(products[0].order).int()
    filled(argument["stages"][0], place=place)
    kept.append(place)
    has_zeros = products[0].matrices[0].has_zeros
    return LaunchPlan(
        parts=tuple(division.parts for division in divisions),
        file="product.cu",
        name=f"product<{kernel_rows(rows)}, {str(has_zeros).lower()}>",
        ctas=ctas,
        shared=fixed + slots * SLOT,
        meets=len(products) > 1,
        adds_normed=False,
        argument=argument,
        kept=kept,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Division:
    """How a product is divided among CTAs.

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
        return cls(
            each=each,
            shares=shares,
            length=length,
            parts=parts,
            ctas=sum(-(-count // e) for count, e in zip(tiles, each, strict=True)),
            tiles=max(each) * len(sets[0]),
            words=max(map(len, flat)),
            scales=max(scale_bytes(share, matrices[0].scale_bytes) for share in flat),
        )

    def shorter(self, product: FusedLinear, processors: int) -> "_Division":
        """Return a division into parts of fewer panels; `length` must be more than one."""
        panels = product.matrices[0].shape[0] // PANEL_ROWS
        return _Division.of(product, -(-panels // (self.length - 1)), processors)

    def input_bytes(self, rows: int, panels: int) -> int:
        """Return the bytes of so many rows of x, later reused for a sum of each warp.

        panels: of x, if all of it is needed; else 0.
        """
        of_x = kernel_rows(rows) * (2 * PANEL_ROWS * max(panels, self.length) + UNIT * self.length)
        return max(of_x, 4 * WARPS * rows * TILE)


def _add(products: Sequence[FusedLinear]) -> list[bool]:
    """Return which products add the norm of the result before them to hidden states."""
    return [False, *(product.after is not None for product in products[:-1])]


def _sets(product: FusedLinear) -> list[list[PackedMatrix]]:
    """Return the sets of matrices whose tiles alternate in a CTA."""
    matrices = list(product.matrices)
    return [matrices] if product.activation else [[matrix] for matrix in matrices]


def _fill(
    entry: np.void,
    product: FusedLinear,
    division: _Division,
    following: FusedLinear | None,
    rows: int,
    device: torch.device,
) -> list[torch.Tensor]:
    """Fill a `STAGE` except inputs and results; return the tensors it points to."""
    kept: list[torch.Tensor] = []
    entry["of"]["first_cta"] = NO_CTA
    entries, ctas = iter(entry["of"]), 0
    for together, each, of_set in zip(_sets(product), division.each, division.shares, strict=True):
        words, tiles = division.words, len(together[0].codes)
        table = [[*share, *[0] * (words - len(share))] for part in of_set for share in part]
        shares = torch.tensor(table, dtype=torch.int32).to(device)
        for index, matrix in enumerate(together):
            of_matrix = next(entries)
            sums = tiles * division.parts * rows * TILE if division.parts > 1 else 0
            partial = torch.empty(sums, device=device)
            arrived = torch.zeros(division.ctas, dtype=torch.int32, device=device)
            filled(
                of_matrix,
                codes=matrix.codes,
                scales=matrix.scales,
                shares=shares,
                partial=partial,
                arrived=arrived,
                columns=matrix.columns,
                tiles=tiles,
                tile_bytes=4 * matrix.codes.shape[1],
                scale_bytes=matrix.scale_bytes * len(matrix.groups),
                each=each,
            )
            if index == 0:
                of_matrix["first_cta"] = ctas
            if matrix.bias is not None:
                filled(of_matrix, bias=matrix.bias)
            kept += [matrix.codes, matrix.scales, shares, partial, arrived]
        ctas += -(-tiles // each)
    if product.norm is not None:
        weight = product.norm.weight[product.order].contiguous()
        filled(entry, norm=weight, eps=product.norm.eps)
        kept.append(weight)
    if following is not None:
        to = torch.argsort(following.order).int()
        filled(entry, to=to)
        kept.append(to)
    activation = product.activation
    filled(
        entry,
        k=product.matrices[0].shape[0],
        length=division.length,
        ctas=division.ctas,
        parts=division.parts,
        words=division.words,
        activation=1 + list(ACTIVATIONS).index(activation) if activation else 0,
        multiplier=1.0 if product.after is not None else product.multiplier,
    )
    return kept


def _fill_after(entry: np.void, before: FusedLinear, product: FusedLinear) -> list[torch.Tensor]:
    """Fill what a `STAGE` adds to hidden states; return the tensors it points to."""
    if before.after is None:
        return []
    order = product.order
    weight = before.after.weight[order].contiguous()
    features, place = order.int(), torch.argsort(order).int()
    filled(
        entry,
        after=weight,
        order=features,
        place=place,
        after_eps=before.after.eps,
        after_multiplier=before.multiplier,
    )
    return [weight, features, place]


def _tiles_each(
    sets: Sequence[Sequence[PackedMatrix]], tiles: Sequence[int], ctas: float
) -> list[int]:
    """Return the tiles per CTA of each set, giving each set CTAs in proportion to its bytes."""
    sizes = [sum(matrix.codes.numel() for matrix in together) for together in sets]
    most, found = MOST_TILES // len(sets[0]), []
    for count, size in zip(tiles, sizes, strict=True):
        share = max(1, int(ctas * size / sum(sizes) + 0.01))
        found.append(-(-count // (share * -(-count // (share * most)))))
    return found


def filled(entry: np.void, **values: torch.Tensor | float) -> np.void:
    """Set fields of a kernel's struct to numbers, or to addresses of contiguous tensors."""
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            assert value.is_contiguous(), f"{name} is not contiguous"
            value = value.data_ptr()
        entry[name] = value
    return entry
