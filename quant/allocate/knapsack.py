"""The exact multiple-choice knapsack behind bit allocation.

Dominated options are dropped first, as none is part of an optimum; HiGHS solves the rest to a zero
gap; the chosen bits are summed again in integers.
"""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from exl2flow.core.errors import AllocationError, BudgetUnreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """choice: option index per slot; value: objective reached; bound: proven lower bound of it."""

    choice: tuple[int, ...]
    bits: int
    value: float
    bound: float
    status: str


def solve(bits: Sequence[Sequence[int]], cost: Sequence[Sequence[float]], budget: int) -> Solution:
    """Choose one option per slot with the least total cost and total bits within the budget.

    Args:
        bits: exact bits of each option of each slot.
        cost: cost of the same options; any finite numbers.
        budget: total bits permitted.

    Raises:
        BudgetUnreachable: even the smallest options exceed the budget.
        AllocationError: the solver found no proven optimum.
    """
    least = sum(min(options) for options in bits)
    if least > budget:
        raise BudgetUnreachable(f"the smallest options need {least} bits, the budget is {budget}")
    fronts = [_pareto(b, c) for b, c in zip(bits, cost, strict=True)]
    choice, bound, status = _solve_milp(bits, cost, fronts, budget)
    return Solution(
        choice=choice,
        bits=sum(b[i] for b, i in zip(bits, choice, strict=True)),
        value=math.fsum(c[i] for c, i in zip(cost, choice, strict=True)),
        bound=bound,
        status=status,
    )


def _pareto(bits: Sequence[int], cost: Sequence[float]) -> list[int]:
    """Return the options that no other option equals or beats in both bits and cost."""
    front: list[int] = []
    for index in sorted(range(len(bits)), key=lambda i: (bits[i], cost[i], i)):
        if not front or cost[index] < cost[front[-1]]:
            front.append(index)
    return front


def _solve_milp(
    bits: Sequence[Sequence[int]],
    cost: Sequence[Sequence[float]],
    fronts: Sequence[Sequence[int]],
    budget: int,
) -> tuple[tuple[int, ...], float, str]:
    """Solve with HiGHS; a capacity that its tolerances overstep is tightened and solved again.

    Bits are counted above each slot's smallest option in units of their common divisor and costs
    relative to the spread, so that HiGHS's absolute tolerances (1e-6) are far below one unit.
    """
    base = sum(b[f[0]] for b, f in zip(bits, fronts, strict=True))
    extra = [b[i] - b[f[0]] for b, f in zip(bits, fronts, strict=True) for i in f]
    unit = math.gcd(*extra) or 1
    floor = math.fsum(c[f[-1]] for c, f in zip(cost, fronts, strict=True))
    above = np.array([c[i] - c[f[-1]] for c, f in zip(cost, fronts, strict=True) for i in f])
    scale = 1e4 / above.max() if above.max() > 0 else 1.0
    slot = [s for s, f in enumerate(fronts) for _ in f]
    option = [i for f in fronts for i in f]
    one_each = csr_matrix(
        (np.ones(len(slot)), (slot, np.arange(len(slot)))), shape=(len(fronts), len(slot))
    )
    weights = np.array([e // unit for e in extra], dtype=float)
    capacity = (budget - base) // unit
    while True:
        with _silent_stdout():
            result = milp(
                above * scale,
                constraints=[
                    LinearConstraint(one_each, 1, 1),
                    LinearConstraint(weights[None, :], -np.inf, float(capacity)),
                ],
                bounds=Bounds(0, 1),
                integrality=np.ones(len(slot), dtype=np.int64),
                options={"mip_rel_gap": 0.0},
            )
        if result.status != 0:
            raise AllocationError(f"bit allocation found no proven optimum: {result.message}")
        picked = np.flatnonzero(result.x > 0.5)
        choice = tuple(option[i] for i in picked)
        if base + sum(extra[i] for i in picked) <= budget:
            bound = floor + float(result.mip_dual_bound) / scale
            return choice, bound, str(result.message).strip()
        capacity -= 1


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Drop what is written to file descriptor 1 inside the block.

    HiGHS prints a line there now and then that no option of SciPy turns off (seen with 1.17), and
    stdout may be read by another program.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
