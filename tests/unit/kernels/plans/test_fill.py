"""How full a plan makes a GPU, in cases small enough to count by hand."""

import numpy as np
import pytest
from product_walks import chain, matrix, product

from exl2flow.kernels import FusedLinear
from exl2flow.kernels.plans import batched
from exl2flow.kernels.plans.fill import facts_of, work_of
from exl2flow.kernels.plans.product import LaunchPlan, plan_of

ROOM = 227 << 10  # bytes of shared memory
BITS = (4, 32)  # of all groups, so that panels have equal bytes


def planned(processors: int, *products: FusedLinear, rows: int = 1) -> LaunchPlan:
    plan = (plan_of if rows <= 4 else batched.plan_of)(products, rows, (processors, ROOM))
    assert plan is not None
    return plan


def shares(plan: LaunchPlan, panel: float) -> list[float]:
    """Return the panels of each CTA, all tiles and stages together."""
    return [round(float(work) / panel, 6) for work in work_of(plan)]


def panel_bytes(one: FusedLinear) -> float:
    """Return the bytes of a panel with its share of the scales."""
    plan = planned(1, one)
    of = plan.argument["stages"][0]["of"][0]
    return float(of["tile_bytes"]) / (len(one.order) // 32)


@pytest.mark.parametrize(
    ("tiles", "processors", "held", "fill"),
    [
        (3, 4, [2, 2, 2], 6 / (4 * 2)),  # a CTA per tile of 2 panels; a multiprocessor has none
        (40, 3, [28, 28, 24], 80 / (3 * 28)),  # 14, 14 and 12 tiles
    ],
)
def test_a_cta_has_the_panels_of_its_tiles(
    tiles: int, processors: int, held: list[float], fill: float
) -> None:
    one = product(matrix(64, 32 * tiles, BITS))

    plan = planned(processors, one)

    assert shares(plan, panel_bytes(one)) == held
    assert facts_of(plan, products=1, processors=processors).fill == pytest.approx(fill)


def test_parts_of_rows_have_their_share_of_a_tile() -> None:
    one = product(matrix(4064, 64, BITS))  # 127 panels in parts of 43, 43 and 41

    plan = planned(132, one)

    assert shares(plan, panel_bytes(one)) == [43, 43, 43, 43, 41, 41]
    facts = facts_of(plan, products=1, processors=132)
    assert facts.fill == pytest.approx(2 * 127 / (132 * 43))


def test_more_tiles_than_ctas_hold_at_once_take_turns() -> None:
    one = product(matrix(64, 32 * 43, BITS))

    plan = planned(2, one)

    facts = facts_of(plan, products=1, processors=2)
    assert facts.fill == pytest.approx(43 / (2 * 22))  # 22 and 21 tiles


def test_stages_of_a_chain_count_together() -> None:
    first = product(matrix(64, 96, BITS), matrix(64, 96, BITS), activation="silu")
    last = product(matrix(96, 64, BITS), adds=True)

    plan = planned(4, first, last)

    # tiles of both matrices alternate: 2 · 2 panels; then 2 tiles of 3 panels
    assert shares(plan, panel_bytes(last)) == [7, 7, 4]
    facts = facts_of(plan, products=2, processors=4)
    assert facts.fill == pytest.approx(18 / (4 * 7))


def test_a_cta_of_more_rows_has_a_tile_for_each_warp() -> None:
    one = product(matrix(64, 32 * 33, BITS))

    plan = planned(3, one, rows=8)

    assert shares(plan, panel_bytes(one)) == [32, 32, 2]
    facts = facts_of(plan, products=1, processors=3)
    assert facts.fill == pytest.approx(33 / (3 * 16))


@pytest.mark.parametrize("rows", [1, 4, 8, 32])
def test_all_ctas_together_read_each_matrix_once(rows: int) -> None:
    products = chain(2048, 5632, 256)

    plan = planned(132, *products, rows=rows)

    whole = sum(
        -(-own.columns // 32) * int(of["tile_bytes"])
        for stage, one in zip(plan.argument["stages"], products, strict=False)
        for of, own in zip(stage["of"], one.matrices, strict=False)
    )
    np.testing.assert_allclose(work_of(plan).sum(), whole)


@pytest.mark.parametrize(("rows", "kernel"), [(3, "product<4, false>"), (9, "batched<16, false>")])
def test_figures_are_those_of_the_launch(rows: int, kernel: str) -> None:
    plan = planned(132, *chain(1024, 2816, 256), rows=rows)

    facts = facts_of(plan, products=4, processors=132)

    assert (facts.kernel, facts.products) == (kernel, 4)
    assert (facts.slots, facts.ctas) == (plan.argument["slots"], plan.ctas)
    assert facts.shared == plan.shared <= ROOM


def test_rounds_of_many_tiles_read_each_tile_once() -> None:
    products = chain(4096, 14336, 1024)

    plan = planned(28, *products)

    whole = sum(own.words.nbytes for one in products for own in one.matrices)
    np.testing.assert_allclose(work_of(plan).sum(), whole)
