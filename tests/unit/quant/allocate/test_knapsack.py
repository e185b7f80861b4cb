"""The knapsack is solved exactly, to the bit, and its optimum is proven."""

import itertools
import math
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from exl2flow.core.errors import BudgetUnreachable
from exl2flow.quant.allocate.knapsack import solve
from exl2flow.quant.measure.candidates import CANDIDATES

ANNEALER_SECONDS = 1.5  # for each of its instances
RELATIVE = 1e-9  # sums of doubles in another order
Table = list[list[int]]
Costs = list[list[float]]


def small_instance(rng: random.Random) -> tuple[Table, Costs, int]:
    """Return bits, costs and a budget; sizes and shapes vary, ties and dominated options occur."""
    unit = rng.choice([1, 32, 1000, 2**20])
    slots = rng.randint(1, 6)
    bits = [[unit * rng.randint(1, 60) for _ in range(rng.randint(1, 5))] for _ in range(slots)]
    costs = [[rng.choice([rng.random(), 0.25]) ** 2 for _ in options] for options in bits]
    low, high = sum(map(min, bits)), sum(map(max, bits))
    return bits, costs, rng.randint(low, high + unit)


def brute_force(bits: Table, costs: Costs, budget: int) -> float:
    return min(
        math.fsum(c[i] for c, i in zip(costs, choice, strict=True))
        for choice in itertools.product(*(range(len(options)) for options in bits))
        if sum(b[i] for b, i in zip(bits, choice, strict=True)) <= budget
    )


def decoder_instance(rng: random.Random, *, layers: int, bpw: float) -> tuple[Table, Costs, int]:
    """Return the slots of a decoder with hidden size 4096, errors falling with the bits."""
    shapes = {
        "attention": dict.fromkeys(("q", "k", "v", "o"), (4096, 4096)),
        "mlp": {"gate": (4096, 11008), "up": (4096, 11008), "down": (11008, 4096)},
    }
    bits: Table = []
    costs: Costs = []
    numel = 0
    for _ in range(layers):
        for kind, projections in shapes.items():
            size = sum(k * n for k, n in projections.values())
            weight = rng.uniform(0.02, 0.5)
            bits.append(
                [
                    sum(row[p].total_bits(k, n) for p, (k, n) in projections.items())
                    for row in CANDIDATES[kind]
                ]
            )
            errors = [weight * 2 ** (1 - b / size) * rng.uniform(0.9, 1.1) for b in bits[-1]]
            costs.append([error**2 for error in errors])
            numel += size
    return bits, costs, int(numel * bpw)


def anneal(bits: Table, costs: Costs, budget: int, rng: random.Random) -> float:
    """Anneal from the first options for a few seconds; return the least cost that was met."""
    choice = [0] * len(bits)
    used, value = sum(b[0] for b in bits), sum(c[0] for c in costs)
    best = value
    begun = time.monotonic()
    while (elapsed := time.monotonic() - begun) < ANNEALER_SECONDS:
        temperature = value / len(bits) * 10 ** (-5 * elapsed / ANNEALER_SECONDS)
        for _ in range(1000):
            slot = rng.randrange(len(bits))
            option = rng.randrange(len(bits[slot]))
            more = bits[slot][option] - bits[slot][choice[slot]]
            worse = costs[slot][option] - costs[slot][choice[slot]]
            if used + more <= budget and (
                worse < 0 or rng.random() < math.exp(-worse / temperature)
            ):
                choice[slot], used, value = option, used + more, value + worse
                best = min(best, value)
    return best


def test_value_is_that_of_brute_force_on_200_instances() -> None:
    rng = random.Random(0)
    for number in range(200):
        bits, costs, budget = small_instance(rng)

        solution = solve(bits, costs, budget)

        assert solution.value == pytest.approx(
            brute_force(bits, costs, budget), rel=RELATIVE, abs=1e-12
        ), f"instance {number}"
        assert solution.bits == sum(b[i] for b, i in zip(bits, solution.choice, strict=True))
        assert solution.bits <= budget


@pytest.mark.parametrize(("layers", "bpw"), [(32, 2.5), (80, 3.0)], ids=str)
def test_annealer_never_finds_anything_better(layers: int, bpw: float) -> None:
    rng = random.Random(layers)
    bits, costs, budget = decoder_instance(rng, layers=layers, bpw=bpw)

    solution = solve(bits, costs, budget)

    assert solution.bits <= budget
    assert solution.value <= anneal(bits, costs, budget, rng) * (1 + RELATIVE)


def test_optimum_is_proven() -> None:
    bits, costs, budget = decoder_instance(random.Random(1), layers=8, bpw=4.0)

    solution = solve(bits, costs, budget)

    assert "Optimal" in solution.status
    # HiGHS works on costs scaled to a spread of 10^4, with tolerances of 1e-6
    assert solution.bound == pytest.approx(solution.value, rel=1e-6)


def test_exact_budget_is_used_up() -> None:
    bits = [[3, 5, 9], [2, 4, 8]]
    costs = [[1.0, 0.5, 0.1], [1.0, 0.6, 0.2]]

    for budget in range(5, 18):
        assert solve(bits, costs, budget).value == pytest.approx(brute_force(bits, costs, budget))


def test_large_sums_are_exact_to_the_bit() -> None:
    """Options differ by a bit in 2^40: no tolerance of doubles may overstep the budget."""
    bits = [[2**40, 2**40 + 1], [2**40, 2**40 + 3]]
    costs = [[1.0, 0.0], [1.0, 0.5]]

    assert solve(bits, costs, 2**41).choice == (0, 0)
    assert solve(bits, costs, 2**41 + 2).choice == (1, 0)
    assert solve(bits, costs, 2**41 + 3).choice == (1, 0)
    assert solve(bits, costs, 2**41 + 4).choice == (1, 1)


def test_ample_budget_takes_the_least_errors_everywhere() -> None:
    bits, costs, _ = decoder_instance(random.Random(2), layers=4, bpw=4.0)

    solution = solve(bits, costs, 10**15)

    assert [c[i] for c, i in zip(costs, solution.choice, strict=True)] == [min(c) for c in costs]


def test_budget_below_the_smallest_options_is_refused() -> None:
    with pytest.raises(BudgetUnreachable, match="need 7 bits, the budget is 6"):
        solve([[3, 5], [4, 9]], [[1.0, 0.5], [1.0, 0.5]], 6)


def random_instance(seed: int) -> tuple[Table, Costs, int]:
    """Return 200 slots of 30 options, which the solver needs some rounds for."""
    rng = random.Random(seed)
    bits = [[rng.randrange(10**6, 10**7) for _ in range(30)] for _ in range(200)]
    costs = [[rng.random() for _ in range(30)] for _ in range(200)]
    return bits, costs, sum(sorted(options)[12] for options in bits)


def test_two_threads_solve_at_once_and_leave_stdout_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = os.fstat(1)
    instances = [random_instance(seed) for seed in range(6)]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda instance: solve(*instance), instances))

    assert os.path.samestat(os.fstat(1), before)
    assert capfd.readouterr() == ("", "")
    assert found == [solve(*instance) for instance in instances]
