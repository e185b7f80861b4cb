"""Plans of a decoder's chains for cards that people own, where the model fits into their memory."""

import sys
from functools import lru_cache
from itertools import product as pairs
from pathlib import Path

import pytest
from cards import CARDS
from product_walks import matrix, product

from exl2flow.kernels import FusedLinear, PackedMatrix, PlanFacts
from exl2flow.kernels.plans import batched
from exl2flow.kernels.plans.fill import facts_of
from exl2flow.kernels.plans.product import BATCHED_ROWS, LEAST_SLOTS, LaunchPlan, plan_of

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

from allocations import HEAD_BITS, Allocation
from shapes import LLAMAS, SIZES

SHAPES = ("1b", "3b", "7b", "8b", "13b", "14b", "32b", "70b")
BITRATES = (4.0, 3.0, 5.0)
DEPTHS = ("middle", "first", "last")
CHAINED = 4  # o; gate and up; down; q, k and v


def file_bytes(shape: str, bpw: float) -> float:
    """Return the bytes of a model: layers, head, and an embedding in fp16."""
    hidden, mlp, layers, heads, kv_heads, head_dim, vocabulary = LLAMAS[shape]
    of_layer = hidden * (2 * head_dim * (heads + kv_heads) + 3 * mlp)
    return (layers * of_layer * bpw + vocabulary * hidden * (HEAD_BITS + 16)) / 8


CASES = [
    pytest.param(
        card,
        shape,
        bpw,
        depth,
        id=f"{card}-{shape}-{bpw:g}-{depth}",
        marks=() if (bpw, depth) == (BITRATES[0], DEPTHS[0]) else pytest.mark.slow,
    )
    for shape, bpw, depth, card in pairs(SHAPES, BITRATES, DEPTHS, CARDS)
    if file_bytes(shape, bpw) < 1e9 * CARDS[card].memory_gb
]
every_case = pytest.mark.parametrize(("card", "shape", "bpw", "depth"), CASES)


@lru_cache(maxsize=1)  # cards take turns
def chain(shape: str, bpw: float, depth: str) -> list[FusedLinear]:
    """Return the products from the attention's output of a layer to the next keys and values."""
    sizes = dict(zip(SIZES, LLAMAS[shape], strict=True))
    hidden, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
    mlp, head_dim = sizes["intermediate_size"], sizes["head_dim"]
    inner, kv = (sizes[f"num_{which}_heads"] * head_dim for which in ("attention", "key_value"))
    layer = {"first": 0, "middle": layers // 2 - 1, "last": layers - 2}[depth]
    allocation = Allocation.nearest(bpw)

    def chosen(role: str, k: int, columns: int) -> PackedMatrix:
        of = layer + (role in ("q", "k", "v"))
        groups = allocation.params(role, of, layers).groups(k)
        return matrix(k, columns, *((g.bits, g.rows) for g in groups for _ in range(g.rows // 32)))

    gate, up = (chosen(role, hidden, mlp) for role in ("gate", "up"))
    return [
        product(chosen("o", inner, hidden), adds=True),
        product(gate, up, activation="silu"),
        product(chosen("down", mlp, hidden), adds=True),
        product(*(chosen(r, hidden, n) for r, n in (("q", inner), ("k", kv), ("v", kv)))),
    ]


def told(plan: LaunchPlan, card: str) -> PlanFacts:
    facts = facts_of(plan, products=CHAINED, processors=CARDS[card].processors)
    print(facts)  # how well a card is filled is told, not bounded
    return facts


@every_case
def test_a_row_has_one_launch_per_layer(card: str, shape: str, bpw: float, depth: str) -> None:
    plan = plan_of(chain(shape, bpw, depth), 1, CARDS[card].limits)

    assert plan is not None
    facts = told(plan, card)
    assert facts.slots >= LEAST_SLOTS == 2
    assert facts.ctas <= CARDS[card].processors
    assert facts.shared <= CARDS[card].shared


@every_case
def test_four_rows_have_one_launch_per_layer(card: str, shape: str, bpw: float, depth: str) -> None:
    products, limits = chain(shape, bpw, depth), CARDS[card].limits

    plan = plan_of(products, 4, limits) or batched.plan_of(products, BATCHED_ROWS[0], limits)

    assert plan is not None
    facts = told(plan, card)
    assert facts.ctas <= CARDS[card].processors
    assert facts.shared <= CARDS[card].shared
