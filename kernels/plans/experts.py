"""Launch plans of a layer of experts for few rows, which `csrc/route.cu` and `experts.cu` follow.

An item is an expert with up to `ITEM_ROWS` of its tokens; a unit of it, two tiles: of gate and up,
or of a part of down's rows. Tables of all experts lie on the device, where their ids choose.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from exl2flow.kernels.interface.activations import ACTIVATIONS
from exl2flow.kernels.interface.experts import ExpertBank, ExpertMatrices
from exl2flow.kernels.interface.groups import PANEL_ROWS, Group
from exl2flow.kernels.interface.packed import BLOCK_PANELS, SCALE_WORDS, TILE, laid_panels
from exl2flow.kernels.interface.router import Scores
from exl2flow.kernels.plans.shares import STEP, kinds_of, slot_bytes
from exl2flow.kernels.plans.sources import fill, filled, struct

ITEM_ROWS = 8  # tokens of an item
EXPERT_WARPS = 8  # of a CTA that multiplies
ROUTE_WARPS, ROUTE_ROWS = 8, 4  # of a CTA that scores: warps with an expert each, and rows
MANY_ROWS, MANY_WARPS = 64, 8  # of a prompt: tokens of a tile, and warps, with 32 columns each
MANY_CHUNK, MANY_SLOTS = 4, 2  # panels of x at a time, of two; steps that a warp has in flight
GATHER_THREADS = 128  # of a CTA that reorders a row
MOST_SLOTS, CTAS = 4, 2  # most steps that a warp has in flight, and CTAs of a multiprocessor
SUMS = 4 * EXPERT_WARPS * ITEM_ROWS * (TILE + 4)  # bytes of a CTA's sums
MANY_SHARED = MANY_WARPS * MANY_SLOTS * (STEP + 4 * BLOCK_PANELS * SCALE_WORDS + 8) + (
    2 * MANY_CHUNK * 64 * MANY_ROWS
)
RESERVED = 1 << 10  # bytes of shared memory that each CTA takes besides
PAIRED = (0, 2, 1, 3, 4, 6, 5, 7)  # where 8 numbers stand, see `paired` in halves.cuh
EXPERT, ARGUMENT = struct("experts.cuh", "Expert"), struct("experts.cuh", "Experts")

Step = tuple[int, int, int, int]  # see `Side` in experts.cuh


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsPlan:
    """The launches of a layer of experts, without inputs and results.

    argument: `ARGUMENT`; ctas, shared: of the launches for up and down, CTAs and bytes of each;
    route_shared: of the router's; pairs: pairs of tiles of a hidden state; tensors: what the
    argument points to.
    """

    argument: np.void
    ctas: int
    shared: int
    route_shared: int
    pairs: int
    tensors: Sequence[torch.Tensor]


def plan_of(bank: ExpertBank, rows: int, limits: tuple[int, int]) -> ExpertsPlan | None:
    """Plan the launches for up to so many rows.

    Args:
        bank: whose matrices are on the device; `is_known`.
        rows: the most.
        limits: multiprocessors of the device, and bytes of shared memory that a CTA can have.

    Returns:
        The plan, or None if a row of x does not fit into shared memory.
    """
    first = bank.experts[0]
    size, inner = len(first.up.order), len(first.down.order)
    parts = -(-inner // size)
    part_rows = -(-inner // (PANEL_ROWS * parts)) * PANEL_ROWS
    x_bytes = 2 * ITEM_ROWS * max(size, part_rows)
    fitting = _fit(x_bytes, slot_bytes(first.up) + 8, limits[1])
    if fitting is None:
        return None
    ctas, slots = fitting
    rule, device = bank.router.rule, first.up.words.device
    shared = bank.shared
    shares = rule.top * parts + (-(-len(shared.down.order) // part_rows) if shared else 0)
    argument = np.zeros(1, ARGUMENT)[0]
    pairs = -(-size // (2 * TILE))
    tensors = _fill_router(argument, bank)
    tensors += fill(
        argument,
        of=_table(bank.all, part_rows, tensors),
        arrived=torch.zeros(1 + rows * pairs, dtype=torch.int32, device=device),
        size=size,
        slots=rule.top + (shared is not None),
        most_inner=max(len(expert.down.order) for expert in bank.all),
        part_rows=part_rows,
        shares=shares,
        activation=_number(bank.activation),
        ring_slots=slots,
        x_bytes=x_bytes,
        multiplier=bank.multiplier,
    )
    return ExpertsPlan(
        argument=argument,
        ctas=limits[0] * ctas,
        shared=_shared(x_bytes, slots, slot_bytes(first.up) + 8),
        route_shared=4 * max(2 * ROUTE_WARPS * rule.experts, rule.experts + 1),
        pairs=pairs,
        tensors=tensors,
    )


def _shared(x_bytes: int, slots: int, slot: int) -> int:
    return x_bytes + SUMS + EXPERT_WARPS * slots * slot


def _fit(x_bytes: int, slot: int, most: int) -> tuple[int, int] | None:
    """Return CTAs of a multiprocessor, and steps that a warp has in flight; the first that fits."""
    for ctas, least in ((CTAS, 2), (1, 1)):
        for slots in range(MOST_SLOTS, least - 1, -1):
            if ctas * (_shared(x_bytes, slots, slot) + RESERVED) <= most + RESERVED:
                return ctas, slots
    return None


def _number(activation: str) -> int:
    """Return the number of an activation in experts.cuh: 0 is the clamped swiglu."""
    return 1 + [*ACTIVATIONS].index(activation) if activation in ACTIVATIONS else 0


def _fill_router(entry: np.void, bank: ExpertBank) -> list[torch.Tensor]:
    """Fill the fields of the router; return what they point to."""
    router, rule, norm = bank.router, bank.router.rule, bank.norm
    weight = router.weight
    if bank.shared_gate is not None:
        weight = torch.cat([weight, bank.shared_gate])
    return fill(
        entry,
        norm=0 if norm is None else norm.weight.contiguous(),
        eps=0.0 if norm is None else norm.eps,
        router=weight.contiguous(),
        bias=0 if router.bias is None else router.bias,
        correction=0 if router.correction is None else router.correction,
        experts=rule.experts,
        top=rule.top,
        gated=int(bank.shared_gate is not None),
        scores=list(Scores).index(rule.scores),
        groups=rule.groups,
        top_groups=rule.top_groups,
        scales_input=int(rule.scales_input),
        norm_power=rule.norm or 0.0,
        least_norm=rule.least_norm,
        scaling=rule.scaling,
    )


def _table(
    experts: Sequence[ExpertMatrices], part_rows: int, tensors: list[torch.Tensor]
) -> torch.Tensor:
    """Return `Expert` of each, uint8 on the device; add what it points to to `tensors`."""
    device = experts[0].up.words.device
    table = np.zeros(len(experts), EXPERT)
    steps, begins = list[Step](), list[int]()
    known: dict[object, tuple[int, int]] = {}  # by groups: where steps and begins of a side are

    def listed(*runs: tuple[tuple[Group, ...], int, int]) -> tuple[int, int]:
        if runs not in known:
            known[runs] = len(steps), len(begins)
            first = len(steps)
            for run in runs:
                begins.append(len(steps) - first)
                steps.extend(_steps(*run))
            begins.append(len(steps) - first)
        return known[runs]

    places = list[tuple[int, int]]()
    for expert in experts:
        gate, up, down = expert
        rows, width = len(up.order), len(down.order)
        whole = ((m.groups, 0, rows // PANEL_ROWS) for m in (gate, up))
        cuts = range(0, width // PANEL_ROWS, part_rows // PANEL_ROWS)
        parts = ((down.groups, c, c + part_rows // PANEL_ROWS) for c in cuts)
        places += [listed(*whole), listed(*parts)]
    step_table = torch.tensor(steps, dtype=torch.int32).to(device)
    begin_table = torch.tensor(begins, dtype=torch.int32).to(device)
    tensors += [step_table, begin_table]
    for index, expert in enumerate(experts):
        for side, (step, begin) in zip(("up", "down"), places[2 * index :][:2], strict=True):
            entry = table[index][side]
            entry["steps"] = step_table.data_ptr() + 16 * step
            entry["begins"] = begin_table.data_ptr() + 4 * begin
        tensors += _fill_expert(table[index], expert, part_rows)
    for name, orders in (
        ("place", [expert.up.order for expert in experts]),
        ("to", [expert.down.order for expert in experts]),
    ):
        tensors += _fill_places(table[name], orders)
    return torch.from_numpy(table.view(np.uint8)).to(device)


def _fill_expert(entry: np.void, expert: ExpertMatrices, part_rows: int) -> list[torch.Tensor]:
    """Fill what is an expert's own; return what it points to."""
    gate, up, down = expert
    for side, pair in (("up", (gate, up)), ("down", (down, down))):
        entry[side]["words"] = [matrix.words.data_ptr() for matrix in pair]
        entry[side]["tile_bytes"] = [4 * matrix.words.shape[1] for matrix in pair]
    filled(entry["up"], pairs=len(gate.words), parts=1)
    filled(entry["down"], pairs=-(-len(down.words) // 2), parts=-(-len(down.order) // part_rows))
    entry["bias"] = [0 if m.bias is None else m.bias.data_ptr() for m in expert]
    entry["inner"] = gate.columns
    return [t for m in expert for t in (m.words, m.bias) if t is not None]


def _fill_places(column: np.ndarray, orders: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Set where in-features are in x, as `paired`; return the tensors, int16 (n, k) each."""
    tensors = []
    paired = torch.tensor(PAIRED, device=orders[0].device)
    for width in {len(order) for order in orders}:
        alike = [index for index, order in enumerate(orders) if len(order) == width]
        place = torch.stack([orders[index] for index in alike]).argsort(dim=1)
        stored = (place - place % 8 + paired[place % 8]).to(torch.int32).to(torch.uint16)
        for row, index in zip(stored, alike, strict=True):
            column[index] = row.data_ptr()
        tensors.append(stored)
    return tensors


@lru_cache(maxsize=4096)
def _steps(groups: tuple[Group, ...], begin: int, end: int) -> tuple[Step, ...]:
    """Return the steps of panels `begin` to `end` of a tile; see `Side` in experts.cuh."""
    run = laid_panels(groups, SCALE_WORDS)[begin:end]
    panel, steps = 0, list[Step]()
    for kind in kinds_of(run):
        steps.append((kind, 4 * run[panel].word, panel, 0))
        panel += kind >> 4 & 7
    return tuple(steps)
