"""Very many slots are allocated within a proven gap, within the budget, and always the same."""

import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from exl2flow.core.errors import BudgetUnreachable
from exl2flow.quant.allocate import knapsack
from exl2flow.quant.allocate.knapsack import MOST_EXACT, MOST_GAP, Solution, solve
from exl2flow.quant.allocate.lagrangian import relaxed
from exl2flow.quant.measure.candidates import HEAD_OPTIONS, PROJECTION_OPTIONS

SHAPES = ((2048, 768), (768, 2048))
ROUNDING = 1e-9  # relative, of sums in another order
Table = list[list[int]]
Costs = list[list[float]]


def experts(count: int, seed: int, *, alike: bool = False) -> tuple[Table, Costs]:
    """Return bits and costs of small matrices and a head; lognormal costs, or equal ones."""
    rng = random.Random(seed)
    known = {shape: [p.total_bits(*shape) for p in PROJECTION_OPTIONS] for shape in SHAPES}
    bits: Table = [[p.total_bits(2048, 4096) for p in HEAD_OPTIONS]]
    costs: Costs = [[4.0 ** (-b / (2048 * 4096)) for b in bits[0]]]
    for index in range(count - 1):
        listed = known[SHAPES[index % 2]]
        weight = 1.0 if alike else rng.lognormvariate(0, 1.5)
        noise = [1.0 if alike else rng.uniform(0.9, 1.1) for _ in listed]
        bits.append(listed)
        costs.append(
            [weight * n * 4.0 ** (-b / 2048 / 768) for b, n in zip(listed, noise, strict=True)]
        )
    return bits, costs


def budget_of(bits: Table, share: float) -> int:
    low, high = sum(map(min, bits)), sum(map(max, bits))
    return low + int(share * (high - low))


def check(solution: Solution, bits: Table, costs: Costs, budget: int) -> None:
    """Ask that a solution is what it says, within the budget and the gap."""
    used = sum(b[i] for b, i in zip(bits, solution.choice, strict=True))
    value = math.fsum(c[i] for c, i in zip(costs, solution.choice, strict=True))
    assert (solution.bits, solution.value) == (used, value)
    assert used <= budget
    assert 0 <= value - solution.bound <= MOST_GAP * abs(value)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [60, 150])
def test_close_to_the_proven_optimum(
    count: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits, costs = experts(count, seed)
    budget = budget_of(bits, random.Random(seed).uniform(0.05, 0.6))
    best = solve(bits, costs, budget)
    assert best.status == "Optimal"
    monkeypatch.setattr(knapsack, "MOST_EXACT", 0)

    close = solve(bits, costs, budget)

    check(close, bits, costs, budget)
    assert close.value >= best.value * (1 - ROUNDING)
    assert close.bound <= best.value * (1 + ROUNDING)


@pytest.mark.parametrize("alike", [False, True], ids=["lognormal", "alike"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.8])
def test_thousands_of_slots(share: float, alike: bool) -> None:
    bits, costs = experts(3000, 1, alike=alike)
    budget = budget_of(bits, share)

    found = solve(bits, costs, budget)

    check(found, bits, costs, budget)
    assert re.fullmatch(r"within \d\.\de-\d\d of optimal", found.status)
    assert solve(bits, costs, budget) == found


def test_random_tables_with_dominated_and_equal_options() -> None:
    rng = np.random.default_rng(2)
    bits = rng.integers(1, 40, (800, 6)).tolist()
    costs = rng.integers(-9, 9, (800, 6)).astype(float).tolist()
    for share in (0.0, 0.1, 0.5, 1.0):
        budget = budget_of(bits, share)
        check(solve(bits, costs, budget), bits, costs, budget)


def test_limits_of_the_budget() -> None:
    bits, costs = experts(MOST_EXACT + 1, 3)
    least = sum(map(min, bits))

    assert solve(bits, costs, least).bits == least
    ample = solve(bits, costs, 10**15)
    assert ample.value == ample.bound == math.fsum(map(min, costs))
    assert ample.status == "within 0.0e+00 of optimal"
    with pytest.raises(BudgetUnreachable, match=f"need {least} bits"):
        solve(bits, costs, least - 1)


def test_a_wide_gap_is_closed_by_the_exact_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    bits, costs = experts(80, 4)
    budget = budget_of(bits, 0.3)
    best = solve(bits, costs, budget)
    smallest = np.array([b.index(min(b)) for b in bits])
    monkeypatch.setattr(knapsack, "MOST_EXACT", 0)
    poor = replace(relaxed(bits, costs, budget), choice=smallest, bound=0.0)
    monkeypatch.setattr(knapsack, "relaxed", lambda *_: poor)

    found = solve(bits, costs, budget)

    check(found, bits, costs, budget)
    assert found.value == pytest.approx(best.value, rel=MOST_GAP)
    assert found.status.startswith("within ")


def test_up_to_500_slots_are_exact() -> None:
    statuses = [solve([[1, 2]] * n, [[1.0, 0.5]] * n, n).status for n in (500, 501)]

    assert statuses == ["Optimal", "within 0.0e+00 of optimal"]
