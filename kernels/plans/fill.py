"""The part of a GPU that a launch plan fills: figures that say why a model is slow on a card."""

import numpy as np

from exl2flow.kernels.interface.facts import PlanFacts
from exl2flow.kernels.interface.groups import PANEL_ROWS
from exl2flow.kernels.plans.product import LaunchPlan
from exl2flow.kernels.plans.shares import WARPS


def facts_of(plan: LaunchPlan, *, products: int, processors: int) -> PlanFacts:
    """Return the facts of a plan for a number of products on a GPU with `processors`."""
    return PlanFacts(
        kernel=plan.name,
        products=products,
        slots=int(plan.argument["slots"]),
        ctas=plan.ctas,
        shared=plan.shared,
        fill=fill_of(plan, processors),
    )


def fill_of(plan: LaunchPlan, processors: int) -> float:
    """Return the work of the average multiprocessor over that of the busiest, all stages together.

    CTAs beyond the number of multiprocessors take turns.
    """
    work = work_of(plan)
    turns = -(-len(work) // processors)
    busy = np.pad(work, (0, turns * processors - len(work))).reshape(turns, -1).sum(0)
    return float(busy.mean() / busy.max())


def work_of(plan: LaunchPlan) -> np.ndarray:
    """Return the bytes of matrices that each CTA reads in all stages, fp64 (ctas,).

    Parts of rows count as equal where they have equally many rows, as if all had equal bits.
    """
    count = _batched_bytes if plan.file == "batched.cu" else _product_bytes
    stages, block = plan.argument["stages"][: plan.argument["count"]], np.arange(plan.ctas)
    return sum((count(stage, block) for stage in stages), start=np.zeros(plan.ctas))


def _product_bytes(stage: np.void, block: np.ndarray) -> np.ndarray:
    """Return the bytes that CTAs read in a stage of `product.cu`: see `Work` in work.cuh."""
    part, cta = np.divmod(block, stage["ctas"])
    panels = int(stage["k"]) // PANEL_ROWS
    share = np.clip(panels - part * stage["length"], 0, stage["length"]) / panels
    found = np.zeros(len(block))
    for of in stage["of"]:
        first = stage["of"][0]["first_cta"] if stage["activation"] else of["first_cta"]
        begin = of["first_tile"] + (cta - first) * of["each"]
        tiles = np.clip(of["tiles"] - begin, 0, of["each"]) * (cta >= first)
        found += share * tiles * of["tile_bytes"]
    return found


def _batched_bytes(stage: np.void, block: np.ndarray) -> np.ndarray:
    """Return the bytes that CTAs read in a stage of `batched.cu`: see `Work` there."""
    found = np.zeros(len(block))
    for of in stage["of"][: stage["matrices"]]:
        cta = block - of["first_cta"]
        held = WARPS * of["each"]
        tiles = np.clip(of["tiles"] - cta // of["parts"] * held, 0, held)
        is_own = (cta >= 0) & (cta < of["ctas"])
        found += is_own * tiles * of["tile_bytes"] / of["parts"]
    return found
