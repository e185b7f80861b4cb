"""Launch plans of fused linears for batch size 5 to 64, which `csrc/batched.cu` follows.

A warp has a part of the rows of some tiles of 32 columns, a CTA of 16 warps one part of a matrix.
CTAs meet after each product and add up its parts together.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from exl2flow.kernels.interface.groups import PANEL_ROWS, Group
from exl2flow.kernels.interface.packed import TILE, FusedLinear, PackedMatrix
from exl2flow.kernels.plans.product import (
    FIXED_SHARED,
    MOST_CHAINED,
    MOST_RANKS,
    LaunchPlan,
    fill_matrix,
    fill_stage,
    instance_of,
    kernel_rows,
    padded_table,
)
from exl2flow.kernels.plans.shares import WARPS, kinds_of, slot_bytes
from exl2flow.kernels.plans.sources import fill, filled, struct

LEAST_SLOTS, MOST_SLOTS = 2, 8  # steps that a warp has in flight
LIST_ROOM = 4 << 10  # bytes that lists of steps take at most
X_SHARE = 0.5  # of shared memory, at most, for x
MOST_PARTS = 64
LIST_HEADER = 3  # ints of a list before its steps
PART_BYTES = 180  # of codes, in whose time a warp's sums of a row of x are stored and added up
READ_BYTES = 240  # of codes, in whose time one more part is read by those who add up
MOST_TOGETHER = 5  # matrices of a product
EXCHANGED_ROWS = 32  # most rows of a launch in which ranks exchange: with more, registers are few
CHAIN = struct(
    "batched.cu",
    "Chain",
    MOST_TOGETHER=MOST_TOGETHER,
    MOST_CHAINED=MOST_CHAINED,
    MOST_RANKS=MOST_RANKS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Division of a matrix: CTAs = parts · teams, a warp of a team has `each` tiles.

    cost: bytes of codes in whose time a warp does its work; panels: most of a part.
    """

    parts: int
    each: int
    ctas: int
    cost: float
    panels: int


def plan_of(
    products: Sequence[FusedLinear], rows: int, limits: tuple[int, int]
) -> LaunchPlan | None:
    """Divide products, each of which reads the previous one's result.

    Args:
        products: up to `MOST_CHAINED` that the kernel knows, matrices on the device, all EXL2 or
            all GPTQ. The first one's norm is not its work.
        rows: rows of x, 5 to 64.
        limits: multiprocessors of the device, all of which get a CTA, and bytes of shared memory
            that a CTA can have.

    Returns:
        The plan, or None if x does not fit.
    """
    processors, most_shared = limits
    slot, room = WARPS * (slot_bytes(products[0].matrices[0]) + 8), most_shared - FIXED_SHARED
    panel_bytes = kernel_rows(rows) * 2 * PANEL_ROWS
    most_x = min(int(X_SHARE * room), room - LEAST_SLOTS * slot - LIST_ROOM)
    most_panels = most_x // (panel_bytes + 4 * PANEL_ROWS)
    divided = []
    for product in products:
        divisions = divide(product.matrices, rows, processors=processors, most_panels=most_panels)
        if divisions is None:
            return None
        divided.append(divisions)
    gathers = [product is products[0] and not product.is_ordered for product in products]
    lists = [
        [
            lists_of(matrix, division.parts, product.order if is_gathered else None)
            for matrix, division in zip(product.matrices, divisions, strict=True)
        ]
        for product, divisions, is_gathered in zip(products, divided, gathers, strict=True)
    ]
    words = [max(len(part) for matrix in of for part in matrix) for of in lists]
    x_bytes = panel_bytes * max(division.panels for of in divided for division in of)
    fixed = x_bytes + 4 * sum(words)
    slots = min(MOST_SLOTS, (room - fixed) // slot)
    if slots < LEAST_SLOTS:
        return None
    argument, tensors = _chain(products, rows, divided, lists)
    filled(argument, slots=slots, x_bytes=x_bytes)
    return LaunchPlan(
        parts=tuple(division.parts for of in divided for division in of),
        stages=tuple(slice(index, index + 1) for index in range(len(products))),
        file="batched.cu",
        name=instance_of("batched", products, rows),
        ctas=processors,
        shared=fixed + slots * slot,
        meets=True,
        adds_normed=True,
        argument=argument,
        tensors=tensors,
    )


Lists = Sequence[Sequence[Sequence[int]]]  # of each matrix and part


def _fill_gather(argument: np.void, products: Sequence[FusedLinear]) -> list[torch.Tensor]:
    """Fill what a `Chain` knows of columns that ranks gather; return the tensors."""
    if products[0].gathers is None:
        return []
    sums = any(product.boxes is not None for product in products)
    return fill(argument["gather"], to=torch.argsort(products[0].order).int(), sums=sums)


def _chain(
    products: Sequence[FusedLinear],
    rows: int,
    divided: Sequence[Sequence[Division]],
    lists: Sequence[Lists],
) -> tuple[np.void, list[torch.Tensor]]:
    """Return a `Chain` without inputs and results, and the tensors it points to."""
    held, device = kernel_rows(rows), products[0].matrices[0].words.device
    squares = 4 * rows * max(len(matrix.words) for p in products for matrix in p.matrices)
    scratch = _scratch(device, 2 * squares + held * max(map(_sums, products, divided)))
    argument = np.zeros(1, CHAIN)[0]
    meetings = torch.zeros(1, dtype=torch.int32, device=device)
    tensors = [*fill(argument, meetings=meetings, count=len(products), rows=rows), scratch]
    tensors += _fill_gather(argument, products)
    stages, list_at = argument["stages"], 0
    for index, (product, divisions, of_lists) in enumerate(
        zip(products, divided, lists, strict=True)
    ):
        entry = stages[index]
        tensors += _fill(entry, product, divisions, of_lists, scratch[2 * squares :], held)
        filled(entry, list_at=list_at, gathers=index == 0 and not product.is_ordered)
        list_at += entry["words"]
        if index:
            before = stages[index - 1], products[index - 1]
            tensors += _join(*before, entry, product, [scratch, scratch[squares:]])
    return argument, tensors


_SCRATCH: dict[torch.device, torch.Tensor] = {}


def _scratch(device: torch.device, count: int) -> torch.Tensor:
    """Return an fp32 scratch buffer of at least `count` elements; launches never overlap.

    They begin at a multiple of 16 bytes.
    """
    scratch = _SCRATCH.get(device)
    if scratch is None or len(scratch) < count:
        scratch = _SCRATCH[device] = torch.empty(count, device=device)
    return scratch


def divide(
    matrices: Sequence[PackedMatrix], rows: int, *, processors: int, most_panels: int
) -> list[Division] | None:
    """Assign CTAs to matrices so that the slowest warp ends earliest; None if x does not fit."""
    options = [_divisions(m.groups, len(m.words), rows, processors, most_panels) for m in matrices]
    if not all(options):
        return None
    costs = sorted({division.cost for of in options for division in of})

    def within(cost: float) -> list[Division] | None:
        """Return the fewest CTAs for each matrix within a cost; None if they are too many."""
        fitting = [[division for division in of if division.cost <= cost] for of in options]
        if not all(fitting):
            return None
        fewest = [min(of, key=lambda division: (division.ctas, division.cost)) for of in fitting]
        return fewest if sum(division.ctas for division in fewest) <= processors else None

    least = bisect_left(costs, True, key=lambda cost: within(cost) is not None)
    return within(costs[least]) if least < len(costs) else None


@lru_cache(maxsize=1024)
def _divisions(
    groups: tuple[Group, ...], tiles: int, rows: int, processors: int, most_panels: int
) -> list[Division]:
    """Return divisions of a matrix whose parts have up to `most_panels`."""
    before, divisions = _bytes_before(groups), list[Division]()
    for parts in range(1, min(len(before) - 1, processors, MOST_PARTS) + 1):
        cuts = _cuts(before, parts)
        longest = int(np.diff(cuts).max())
        if longest > most_panels:
            continue
        most_bytes = int(np.diff(before[cuts]).max()) + PART_BYTES * rows
        last = 0
        for teams in range(1, processors // parts + 1):
            each = -(-tiles // (WARPS * teams))
            if each == last:
                continue
            last, cost = each, float(each * most_bytes + READ_BYTES * parts)
            ctas = parts * teams
            divisions.append(Division(parts=parts, each=each, ctas=ctas, cost=cost, panels=longest))
    return divisions


def _bytes_before(groups: Sequence[Group]) -> np.ndarray:
    """Return the bytes of a tile's codes before each panel, and of all."""
    bits = [group.bits for group in groups for _ in range(group.rows // PANEL_ROWS)]
    return np.concatenate([[0], np.cumsum(bits)]) * (4 * TILE)


def _cuts(before: np.ndarray, parts: int) -> np.ndarray:
    """Return where parts of about equal bytes begin, in panels, and the end; none is empty."""
    panels = len(before) - 1
    wanted = before[-1] * np.arange(1, parts) / parts
    above = np.searchsorted(before, wanted)
    nearest = above - (wanted - before[above - 1] < before[above] - wanted)
    least = np.arange(1, parts)
    inner = np.maximum.accumulate(nearest - least) + least  # each at least one more than the last
    return np.concatenate([[0], np.clip(inner, least, panels - parts + least), [panels]])


def lists_of(matrix: PackedMatrix, parts: int, order: torch.Tensor | None) -> list[tuple[int, ...]]:
    """Return the list of each part: see `Work` in batched.cu.

    order: of the rows of x, if they are gathered.
    """
    panels, all_places = matrix.panels(), [] if order is None else order.tolist()
    lists = []
    for begin, end in pairwise(_cuts(_bytes_before(matrix.groups), parts).tolist()):
        header = (begin, end - begin, 4 * panels[begin].word)
        places = all_places[begin * PANEL_ROWS : end * PANEL_ROWS]
        lists.append((*header, *places, *kinds_of(panels[begin:end])))
    return lists


def _sums(product: FusedLinear, divided: Sequence[Division]) -> int:
    """Return how many sums are kept of each row of x."""
    matrices = zip(product.matrices, divided, strict=True)
    return sum(len(matrix.words) * division.parts * TILE for matrix, division in matrices)


def _fill(
    entry: np.void,
    product: FusedLinear,
    divisions: Sequence[Division],
    lists: Lists,
    sums: torch.Tensor,
    held: int,
) -> list[torch.Tensor]:
    """Fill a `Stage` except inputs and results; return the tensors it points to."""
    words = max(len(part) for of_matrix in lists for part in of_matrix)
    tensors = fill_stage(entry, product, matrices=len(product.matrices), words=words)
    first_cta = first_sum = 0
    for of, matrix, division, parts in zip(
        entry["of"], product.matrices, divisions, lists, strict=False
    ):
        tensors += fill_matrix(
            of,
            matrix,
            tiles=len(matrix.words),
            lists=padded_table(parts, words, matrix.words.device),
            partial=sums[first_sum:],
            parts=division.parts,
            each=division.each,
            first_cta=first_cta,
            ctas=division.ctas,
        )
        first_cta += division.ctas
        first_sum += len(matrix.words) * division.parts * TILE * held
    return tensors


def _join(
    stage: np.void,
    before: FusedLinear,
    entry: np.void,
    product: FusedLinear,
    squares: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Fill the fields of a stage that serve the next stage, `entry`; return the tensors used.

    squares: room for those of a result, and of its sum with hidden states.
    """
    tensors = fill(stage, to=torch.argsort(product.order).int())
    x_squares, name = squares[0], "squared"
    if before.after is not None:
        by = before.after
        tensors += fill(
            stage,
            after=by.weight,
            squared=x_squares,
            after_eps=by.eps,
            after_multiplier=before.multiplier,
        )
        x_squares, name = squares[1], "summed"
    if product.norm is not None:
        norm = product.norm
        weight = norm.weight[product.order].contiguous()
        filled(stage, **{name: x_squares}, totals=norm.centered)
        tensors += fill(entry, norm=weight, squares=x_squares, eps=norm.eps, centered=norm.centered)
    return tensors
