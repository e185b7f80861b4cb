"""Allocations keep their budget, improve with it, and waste nothing."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2flow.core.errors import BudgetUnreachable
from exl2flow.quant.allocate.knapsack import Solution, solve

Table = list[list[int]]
Costs = list[list[float]]
RELATIVE = 1e-9  # sums of doubles in another order


@st.composite
def instances(draw: st.DrawFn) -> tuple[Table, Costs]:
    """Draw slots with options of any bits and costs; costs may be negative, as logarithms are."""
    counts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    bits = [[draw(st.integers(0, 2**34)) for _ in range(count)] for count in counts]
    number = st.floats(-14, 1, allow_nan=False, width=32)
    costs = [[draw(number) for _ in range(count)] for count in counts]
    return bits, costs


def check(bits: Table, costs: Costs, budget: int, solution: Solution) -> None:
    used = sum(b[i] for b, i in zip(bits, solution.choice, strict=True))
    assert used == solution.bits <= budget
    value = math.fsum(c[i] for c, i in zip(costs, solution.choice, strict=True))
    assert solution.value == value


@given(instance=instances(), share=st.floats(0, 1.2))
def test_budget_is_never_exceeded(instance: tuple[Table, Costs], share: float) -> None:
    bits, costs = instance
    low, high = sum(map(min, bits)), sum(map(max, bits))
    budget = low + int(share * (high - low))

    check(bits, costs, budget, solve(bits, costs, budget))


@given(instance=instances())
def test_less_than_the_smallest_options_is_refused(instance: tuple[Table, Costs]) -> None:
    bits, costs = instance
    least = sum(map(min, bits))

    check(bits, costs, least, solve(bits, costs, least))
    with pytest.raises(BudgetUnreachable):
        solve(bits, costs, least - 1)


@given(instance=instances(), shares=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_more_budget_is_never_worse(
    instance: tuple[Table, Costs], shares: tuple[float, float]
) -> None:
    bits, costs = instance
    low, high = sum(map(min, bits)), sum(map(max, bits))
    less, more = (low + int(share * (high - low)) for share in sorted(shares))

    poor, rich = solve(bits, costs, less), solve(bits, costs, more)

    assert rich.value <= poor.value + RELATIVE * max(1.0, abs(poor.value))


@given(instance=instances(), share=st.floats(0, 1))
def test_no_single_exchange_improves_the_choice(
    instance: tuple[Table, Costs], share: float
) -> None:
    bits, costs = instance
    low, high = sum(map(min, bits)), sum(map(max, bits))
    budget = low + int(share * (high - low))

    solution = solve(bits, costs, budget)

    for b, c, chosen in zip(bits, costs, solution.choice, strict=True):
        room = budget - solution.bits + b[chosen]
        best = min(cost for size, cost in zip(b, c, strict=True) if size <= room)
        # HiGHS compares costs scaled to a spread of 10^4 with tolerances of 1e-6
        assert c[chosen] <= best + 1e-8
