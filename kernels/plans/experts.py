"""Launch plans of a layer of experts for few rows, which `csrc/experts.cu` follows.

An item is an expert with up to `ITEM_ROWS` of its tokens; a unit of it, two tiles: of gate and up,
or of a part of down's rows. Tables of all experts lie on the device, where their ids choose.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain

import numpy as np
import torch

from exl2flow.kernels.interface.activations import ACTIVATIONS
from exl2flow.kernels.interface.experts import FEW_EXPERT_ROWS, ExpertBank, ExpertMatrices
from exl2flow.kernels.interface.groups import PANEL_ROWS, Group
from exl2flow.kernels.interface.packed import BLOCK_PANELS, SCALE_WORDS, TILE, laid_panels
from exl2flow.kernels.interface.router import Scores
from exl2flow.kernels.plans.shares import STEP, kinds_of, slot_bytes
from exl2flow.kernels.plans.sources import fill, filled, struct

ITEM_ROWS = 8  # tokens of an item
EXPERT_WARPS = 8  # of a CTA
ROUTE_ROWS = 4  # rows for which a warp scores an expert at a time
MANY_ROWS, MANY_WARPS = 64, 8  # of a prompt: tokens of a tile, and warps, with 32 columns each
MANY_CHUNK, MANY_SLOTS = 4, 2  # panels of x at a time, of two; steps that a warp has in flight
GATHER_THREADS = 128  # of a CTA that reorders a row
MOST_SLOTS, CTAS = 4, 2  # most steps that a warp has in flight, and CTAs of a multiprocessor
SUMS = 4 * EXPERT_WARPS * ITEM_ROWS * (TILE + 4)  # bytes of a CTA's sums of a unit
MANY_SHARED = MANY_WARPS * MANY_SLOTS * (STEP + 4 * BLOCK_PANELS * SCALE_WORDS + 8) + (
    2 * MANY_CHUNK * 64 * MANY_ROWS
)
RESERVED, OF_SYSTEM = 1280, 1024  # bytes of shared memory that each CTA takes besides; of these
PAIRED = (0, 2, 1, 3, 4, 6, 5, 7)  # where 8 numbers stand, see `paired` in halves.cuh
MOST_BEGINS = 17  # of the parts of down's rows, and their end
EXPERT = struct("experts.cuh", "Expert", MOST_BEGINS=MOST_BEGINS)
ARGUMENT = struct("experts.cuh", "Experts")

STEP_BYTES = 16
Step = tuple[int, int, int, int]  # see `Side` in experts.cuh


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsPlan:
    """The launch of a layer of experts for few rows, without inputs and results.

    argument: `ARGUMENT`; ctas, shared: their number, and bytes of each; tensors: what the argument
    points to.
    """

    argument: np.void
    ctas: int
    shared: int
    tensors: Sequence[torch.Tensor]


def plan_of(bank: ExpertBank, limits: tuple[int, int]) -> ExpertsPlan | None:
    """Plan the launch for few rows.

    Args:
        bank: whose matrices are on the device; `is_known`.
        limits: multiprocessors of the device, and bytes of shared memory that a CTA can have.

    Returns:
        The plan, or None if what an expert reads does not fit into shared memory.
    """
    first, rule = bank.experts[0], bank.router.rule
    size, inner = len(first.up.order), len(first.down.order)
    parts = -(-inner // size)
    part_rows = -(-inner // (PANEL_ROWS * parts)) * PANEL_ROWS
    shared_parts = 0 if bank.shared is None else -(-len(bank.shared.down.order) // part_rows)
    slot = slot_bytes(first.up) + 8
    # ids of all rows, with scores and ranks by warp, then counts of experts
    routed = FEW_EXPERT_ROWS * (rule.top + 1) + max(
        2 * EXPERT_WARPS * rule.experts, rule.experts + 1
    )
    x_bytes = max(
        2 * ITEM_ROWS * max(size, part_rows), 2 * ROUTE_ROWS * size, -(-routed // 32) * 128
    )
    fitting = _fit(x_bytes, slot, limits[1])
    if fitting is None or max(parts, shared_parts) >= MOST_BEGINS:
        return None
    ctas, slots, turns = fitting
    argument, counters = np.zeros(1, ARGUMENT)[0], first.up.words.new_zeros(2)
    tables = _tables(bank.all, part_rows)
    tensors = fill(
        argument,
        of=tables[0],
        table_bytes=tables[0].nbytes,
        arrived=counters,
        meetings=counters[1:],
        size=size,
        slots=rule.top + (bank.shared is not None),
        most_inner=max(len(expert.down.order) for expert in bank.all),
        part_rows=part_rows,
        shares=rule.top * parts + shared_parts,
        activation=_number(bank.activation),
        ring_slots=slots,
        x_bytes=x_bytes,
        turns=turns,
        multiplier=bank.multiplier,
    )
    return ExpertsPlan(
        argument=argument,
        ctas=limits[0] * ctas,
        shared=_shared(x_bytes, slots, slot, turns),
        tensors=[*tensors, *tables, *_fill_router(argument, bank)],
    )


def _shared(x_bytes: int, slots: int, slot: int, turns: int) -> int:
    return x_bytes + turns * SUMS + EXPERT_WARPS * slots * slot


def _fit(x_bytes: int, slot: int, most: int) -> tuple[int, int, int] | None:
    """Return the first that fits: CTAs of a multiprocessor, steps in flight of a warp, and turns.

    turns: whose sums a CTA holds, of two units in turn or of one.
    """
    for ctas, least, turns in ((CTAS, 2, 2), (1, 1, 2), (1, 1, 1)):
        for slots in range(MOST_SLOTS, least - 1, -1):
            if ctas * (_shared(x_bytes, slots, slot, turns) + RESERVED) <= most + OF_SYSTEM:
                return ctas, slots, turns
    return None


def _number(activation: str) -> int:
    """Return the number of an activation in experts.cuh: 0 is the clamped swiglu."""
    return 1 + [*ACTIVATIONS].index(activation) if activation in ACTIVATIONS else 0


def _fill_router(entry: np.void, bank: ExpertBank) -> list[torch.Tensor]:
    """Fill the fields of the router; return what they point to."""
    router, rule, norm = bank.router, bank.router.rule, bank.norm
    norm = norm if norm is not None and norm.is_plain else None
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
        places=0 if bank.places is None else bank.places,
        held=len(bank.experts),
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


def _tables(experts: Sequence[ExpertMatrices], part_rows: int) -> list[torch.Tensor]:
    """Return on the device `Expert` of each with their steps, uint8, and what they point to."""
    device = experts[0].up.words.device
    table, steps = np.zeros(len(experts), EXPERT), list[Step]()
    known: dict[object, tuple[int, list[int]]] = {}  # by groups: the first step, and begins

    def listed(*runs: tuple[tuple[Group, ...], int, int]) -> tuple[int, list[int]]:
        if runs not in known:
            lists = [_steps(*run) for run in runs]
            known[runs] = len(steps), [*accumulate(map(len, lists), initial=0)]
            steps.extend(chain.from_iterable(lists))
        return known[runs]

    places = list[int]()
    for entry, (gate, up, down) in zip(table, experts, strict=True):
        panels, cuts = len(up.order) // PANEL_ROWS, range(0, len(down.order), part_rows)
        sides = (
            ("up", (gate, up), [(m.groups, 0, panels) for m in (gate, up)]),
            (
                "down",
                (down, down),
                [(down.groups, c // PANEL_ROWS, (c + part_rows) // PANEL_ROWS) for c in cuts],
            ),
        )
        for name, pair, runs in sides:
            first, begins = listed(*runs)
            places.append(first)
            side = entry[name]
            side["begins"][: len(begins)] = begins
            side["words"] = [matrix.words.data_ptr() for matrix in pair]
            side["tile_bytes"] = [4 * matrix.words.shape[1] for matrix in pair]
        filled(entry["up"], pairs=len(gate.words), parts=1)
        filled(entry["down"], pairs=-(-len(down.words) // 2), parts=len(cuts))
        entry["bias"] = [0 if m.bias is None else m.bias.data_ptr() for m in (gate, up, down)]
        entry["inner"] = gate.columns
    tensors = _fill_places(table["place"], [expert.up.order for expert in experts])
    tensors += _fill_places(table["to"], [expert.down.order for expert in experts])
    padding = -table.nbytes % STEP_BYTES
    room = torch.empty(table.nbytes + padding + STEP_BYTES * len(steps), dtype=torch.uint8)
    stored, begin = room.to(device), table.nbytes + padding
    firsts = stored.data_ptr() + begin + STEP_BYTES * np.array(places, np.uint64).reshape(-1, 2)
    table["up"]["steps"], table["down"]["steps"] = firsts.T
    room[: table.nbytes] = torch.from_numpy(table.view(np.uint8))
    room[begin:] = torch.tensor(steps, dtype=torch.int32).view(-1).view(torch.uint8)
    stored.copy_(room)
    matrices = chain.from_iterable(experts)
    return [stored, *tensors, *(t for m in matrices for t in (m.words, m.bias) if t is not None)]


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
