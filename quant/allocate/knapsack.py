"""The multiple-choice knapsack behind bit allocation: exact up to `MOST_EXACT` slots.

More of them are solved with a Lagrangian to a proven gap of at most `MOST_GAP`. Else options that
no optimum needs are dropped first: dominated ones, then the ones that the Lagrangian bound excludes
(Kellerer, Pferschy, Pisinger: Knapsack Problems, section 11.4). HiGHS solves the rest to a zero
gap; the chosen bits are summed again in integers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from exl2flow.core.errors import AllocationError, BudgetUnreachable
from exl2flow.quant.allocate.lagrangian import relaxed

MOST_EXACT = 500  # slots: 768 took 44 s
MOST_GAP = 1e-4  # between cost and bound above that, as a share of the cost


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

    Above `MOST_EXACT` slots the cost is within `MOST_GAP` of the least; `status` says how close.

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
    close = relaxed(bits, cost, budget)
    if len(bits) <= MOST_EXACT:
        return _solution(bits, cost, *_exact(bits, cost, close.fronts, budget))
    found = _solution(bits, cost, close.choice.tolist(), close.bound)
    for share in (MOST_GAP / 2, MOST_GAP / 2, 0.0):  # of a value that may still be far too great
        if found.value - found.bound <= MOST_GAP * abs(found.value):
            break
        gap = share * abs(found.value)
        found = _solution(bits, cost, *_exact(bits, cost, close.fronts, budget, gap)[:2])
    return found


def _solution(
    bits: Sequence[Sequence[int]],
    cost: Sequence[Sequence[float]],
    choice: Sequence[int],
    bound: float,
    status: str = "",
) -> Solution:
    """Sum up a choice; without a status, it is how close the choice is to the bound."""
    value = math.fsum(c[i] for c, i in zip(cost, choice, strict=True))
    if not status:
        bound = float(min(bound, value))  # but for rounding it is
        gap = (value - bound) / abs(value) if value else 0.0
        status = f"within {gap:.1e} of optimal"
    used = sum(b[i] for b, i in zip(bits, choice, strict=True))
    return Solution(choice=tuple(choice), bits=used, value=value, bound=bound, status=status)


def _exact(
    bits: Sequence[Sequence[int]],
    cost: Sequence[Sequence[float]],
    fronts: Sequence[Sequence[int]],
    budget: int,
    gap: float = 0.0,
) -> tuple[tuple[int, ...], float, str]:
    """Return the choice, the bound and the status of HiGHS, which may stop at a gap.

    If its tolerances exceed the capacity, that is tightened and solved again.

    Bits are counted above each slot's smallest option in units of their common divisor and costs
    relative to the spread, so that HiGHS's absolute tolerances (1e-6) are far below one unit.
    """
    base = sum(b[f[0]] for b, f in zip(bits, fronts, strict=True))
    extra = [b[i] - b[f[0]] for b, f in zip(bits, fronts, strict=True) for i in f]
    unit = math.gcd(*extra) or 1
    floor = math.fsum(c[f[-1]] for c, f in zip(cost, fronts, strict=True))
    above = np.array([c[i] - c[f[-1]] for c, f in zip(cost, fronts, strict=True) for i in f])
    scale = 1e4 / above.max() if above.max() > 0 else 1.0
    solver = _one_of_each([len(f) for f in fronts], above * scale)
    option = [i for f in fronts for i in f]
    weights = np.array([e // unit for e in extra], dtype=float)
    if gap:
        solver.setOptionValue("mip_abs_gap", gap * scale)
    columns = np.arange(len(option), dtype=np.int32)
    capacity = (budget - base) // unit
    solver.addRow(-highspy.kHighsInf, float(capacity), len(columns), columns, weights)
    while True:
        solver.run()
        status = solver.modelStatusToString(solver.getModelStatus())
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            raise AllocationError(f"bit allocation found no proven optimum: {status}")
        picked = np.flatnonzero(np.array(solver.getSolution().col_value) > 0.5)
        choice = tuple(option[i] for i in picked)
        if base + sum(extra[i] for i in picked) <= budget:
            bound = floor + solver.getInfo().mip_dual_bound / scale
            return choice, bound, status
        capacity -= 1
        solver.changeRowBounds(len(fronts), -highspy.kHighsInf, float(capacity))


def _one_of_each(sizes: Sequence[int], cost: np.ndarray) -> highspy.Highs:
    """Return a silent solver with a binary variable per option, exactly one of them 1 per slot.

    Args:
        sizes: the number of options of each slot.
        cost: of all options, in slot order.
    """
    solver = highspy.Highs()  # type: ignore[no-untyped-call]  # its constructor has no types
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 0.0)
    number = len(cost)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = number, len(sizes)
    model.col_cost_ = cost
    model.col_lower_, model.col_upper_ = np.zeros(number), np.ones(number)
    model.integrality_ = [highspy.HighsVarType.kInteger] * number
    model.row_lower_ = model.row_upper_ = np.ones(len(sizes))
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.cumsum([0, *sizes])
    model.a_matrix_.index_ = np.arange(number)
    model.a_matrix_.value_ = np.ones(number)
    solver.passModel(model)
    return solver
