"""A layer of experts on a GPU: few rows in one launch; many sorted by expert.

The host waits for no route.
"""

from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch

from exl2flow.kernels.cuda.compiler import (
    EXCHANGE_CTAS,
    LaunchRefused,
    launch,
    limits,
    tell_refusal,
)
from exl2flow.kernels.cuda.exchange import ALONE
from exl2flow.kernels.cuda.steps import norm
from exl2flow.kernels.interface.boxes import Boxes
from exl2flow.kernels.interface.experts import FEW_EXPERT_ROWS, ExpertBank
from exl2flow.kernels.interface.packed import TILE
from exl2flow.kernels.plans.experts import (
    EXPERT_WARPS,
    GATHER_THREADS,
    MANY_ROWS,
    MANY_SHARED,
    MANY_WARPS,
    ExpertsPlan,
    plan_of,
)
from exl2flow.kernels.plans.sources import filled, struct
from exl2flow.kernels.reference import experts as torch_experts
from exl2flow.kernels.reference.router import route

ITEM, SORTED = struct("experts.cuh", "Item"), struct("experts_many.cu", "Sorted")
_PLANS: WeakKeyDictionary[ExpertBank, ExpertsPlan | None] = WeakKeyDictionary()


def experts(hidden: torch.Tensor, bank: ExpertBank) -> torch.Tensor:
    """See `Ops.experts`."""
    plan = _plan(bank)
    if plan is None:
        return torch_experts.experts(hidden, bank)
    if len(hidden) > FEW_EXPERT_ROWS:
        return _many(hidden, bank, plan)
    return _few(hidden, bank, plan, None)


def experts_at_once(hidden: torch.Tensor, bank: ExpertBank, boxes: Boxes) -> torch.Tensor | None:
    """See `Ops.experts_at_once`."""
    plan, is_sent = _plan(bank), hidden.numel() <= boxes.room
    if plan is None or not is_sent or len(hidden) > FEW_EXPERT_ROWS or plan.ctas > EXCHANGE_CTAS:
        return None
    return _few(hidden, bank, plan, boxes)


def runs_experts(bank: ExpertBank) -> bool:
    """See `Ops.runs_experts`."""
    return _plan(bank) is not None


def _plan(bank: ExpertBank) -> ExpertsPlan | None:
    """Return the plan of a bank, computed once; None: the kernels cannot run it."""
    if bank not in _PLANS:
        device = bank.experts[0].up.words.device
        _PLANS[bank] = plan_of(bank, limits(device.index)) if bank.is_known else None
    return _PLANS[bank]


def _few(
    hidden: torch.Tensor, bank: ExpertBank, plan: ExpertsPlan, boxes: Boxes | None
) -> torch.Tensor:
    """Run the launch of at most `FEW_EXPERT_ROWS` rows, with fewer CTAs if it is refused."""
    while True:
        try:
            return _launched(hidden, bank, plan, boxes)
        except LaunchRefused as refusal:
            if plan.ctas == 1:
                raise
            _PLANS[bank] = plan = replace(plan, ctas=plan.ctas // 2)
            tell_refusal("experts.cu", refusal.reason, "half as many CTAs")


def _launched(
    hidden: torch.Tensor, bank: ExpertBank, plan: ExpertsPlan, boxes: Boxes | None
) -> torch.Tensor:
    """Return the result of a launch; boxes: through which ranks add up their parts in it."""
    hidden = hidden.contiguous()
    entering = hidden
    if bank.norm is not None and not bank.norm.is_plain:
        entering = norm(hidden, bank.norm)
    argument, rows = plan.argument.copy(), len(hidden)
    size, slots, count = (int(argument[name]) for name in ("size", "slots", "experts"))
    all_slots = rows * slots
    x = torch.empty_like(hidden)
    result = _result(hidden, bank) if boxes is None else torch.empty_like(hidden)
    assigned = hidden.new_empty(all_slots, dtype=torch.int32)
    items = hidden.new_empty(all_slots + 1, ITEM.itemsize, dtype=torch.uint8)
    floats = hidden.new_empty(rows * (count + 1) + all_slots, dtype=torch.float32)
    partial = floats.new_empty(rows * int(argument["shares"]) * size)
    inner = hidden.new_empty(all_slots * int(argument["most_inner"]))
    filled(
        argument,
        rows=rows,
        hidden=hidden,
        entering=entering,
        x=x,
        logits=floats,
        weights=floats[rows * (count + 1) :],
        assigned=assigned,
        totals=items[-1],
        items=items,
        inner=inner,
        partial=partial,
        added=hidden.new_empty(rows, dtype=torch.int32),
        sum=result,
        part=result,
    )
    launch(
        "experts.cu",
        "experts",
        (plan.ctas,),
        argument,
        ALONE if boxes is None else boxes.peers,
        threads=32 * EXPERT_WARPS,
        shared=plan.shared,
        device=hidden.device,
        together=True,
    )
    return result


def _many(hidden: torch.Tensor, bank: ExpertBank, plan: ExpertsPlan) -> torch.Tensor:
    """Run the launches of any number of rows."""
    hidden = hidden.contiguous()
    x = hidden if bank.norm is None else norm(hidden, bank.norm)
    ids, weights = _slots(x, bank)
    (rows, slots), count = ids.shape, len(bank.all)
    by_expert, assigned = ids.flatten().sort(stable=True)
    offsets = torch.searchsorted(by_expert, torch.arange(count + 1, device=ids.device))
    tiles = (offsets.diff() + MANY_ROWS - 1) // MANY_ROWS
    before = torch.nn.functional.pad(tiles.cumsum(0), (1, 0))
    size, most_inner = int(plan.argument["size"]), int(plan.argument["most_inner"])
    staged = hidden.new_empty(rows * slots, max(size, most_inner))
    inner, y = (hidden.new_empty(rows * slots, width) for width in (most_inner, size))
    places, result = ids.new_empty(rows * slots, dtype=torch.int32), _result(hidden, bank)
    tensors = {"offsets": offsets, "before": before, "assigned": assigned, "places": places}
    tensors |= {"x": x, "weights": weights, "hidden": hidden, "staged": staged, "inner": inner}
    argument = filled(np.zeros(1, SORTED)[0], **tensors, y=y, sum=result, rows=rows, experts=count)
    argument["part"] = 0 if bank.places is None else result.data_ptr()
    for name in ("of", "slots", "top", "size", "most_inner", "activation", "scales_input"):
        argument[name] = plan.argument[name]
    argument["multiplier"] = bank.multiplier
    launched = partial(launch, "experts_many.cu", device=hidden.device)
    most_tiles = rows * slots // MANY_ROWS + count
    widths = (2 * most_inner, size)  # gate's and up's columns; down's
    for side, width in zip(("up", "down"), widths, strict=True):
        read = 2 * (size if side == "up" else most_inner)
        grid = -(-width // (MANY_WARPS * TILE)), most_tiles
        each, threads = (rows * slots,), 32 * MANY_WARPS
        launched(f"gather_{side}", each, argument, threads=GATHER_THREADS, shared=read)
        launched(f"many_{side}", grid, argument, threads=threads, shared=MANY_SHARED)
    ctas = -(-rows * size // (8 * GATHER_THREADS))
    launched("combine", (ctas,), argument, threads=GATHER_THREADS)
    return result


def _result(hidden: torch.Tensor, bank: ExpertBank) -> torch.Tensor:
    """Return room for the result of a launch."""
    is_part = bank.places is not None
    return torch.empty_like(hidden, dtype=torch.float32 if is_part else None)


def _slots(x: torch.Tensor, bank: ExpertBank) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of rows x (rows, hidden) and their weights fp32, (rows, slots) each.

    Experts are indexes in `ExpertBank.all`, or -1 if they are elsewhere.
    """
    routes = route(x, bank.router)
    own = routes.ids if bank.places is None else bank.places[routes.ids]
    if bank.shared is None:
        return own, routes.weights.contiguous()
    shape, gate = (len(x), 1), bank.shared_gate
    share = x.new_ones(shape).float()
    if gate is not None:
        share = torch.nn.functional.linear(x.float(), gate).sigmoid().half().float()
    ids = own.new_full(shape, len(bank.experts))
    return torch.cat([own, ids], 1), torch.cat([routes.weights, share], 1)
