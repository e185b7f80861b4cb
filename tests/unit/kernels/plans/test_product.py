"""The division of products among CTAs and warps: `product_walks` walks plans like a GPU."""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import accumulate

import numpy as np
import pytest
import torch
from product_walks import (
    A100,
    DEVICES,
    H200,
    RTX_4090,
    case_of,
    chain,
    matrix,
    product,
    shares_of,
    stages,
    steps_of,
)

from exl2flow.kernels import NormArgs
from exl2flow.kernels.cuda.exchange import PeerBoxes
from exl2flow.kernels.interface.packed import BLOCK_PANELS
from exl2flow.kernels.plans.product import (
    FIXED_SHARED,
    LEAST_SLOTS,
    MOST_ROWS,
    MOST_SLOTS,
    NO_CTA,
    LaunchPlan,
    plan_of,
)
from exl2flow.kernels.plans.shares import STEP, WARPS

MADE = {
    "one group": lambda: case_of([product(matrix(32, 32, (4, 32)))], 1, H200),
    "one matrix": lambda: case_of([product(matrix(4096, 4096, (4, 128)))], 1, H200),
    "few columns": lambda: case_of([product(matrix(4064, 40, (8, 128), (3, 96)))], 3, H200),
    "few rows": lambda: case_of([product(matrix(96, 33000, (6, 32), (5, 64)))], 3, H200),
    "short groups": lambda: case_of([product(matrix(8192, 2000, (8, 32), (6, 32)))], 4, H200),
    "long groups": lambda: case_of(
        [product(matrix(11008, 992, (6, 96), (5, 160), (3, 288)))], 4, A100
    ),
    "small memory": lambda: case_of([product(matrix(28672, 256, (3, 64), (2, 64)))], 4, RTX_4090),
    "gptq": lambda: case_of([product(matrix(14336, 1024, (4, 128), zeros=True))], 4, H200),
    "gated": lambda: case_of(
        [
            product(
                matrix(4096, 1390, (5, 32), (4, 128)),
                matrix(4096, 1390, (3, 64), (2, 32)),
                activation="gelu",
            )
        ],
        3,
        H200,
    ),
    "gated parts": lambda: case_of(
        [
            product(
                matrix(2048, 96, (8, 32)), matrix(2048, 96, (4, 128), (2, 64)), activation="silu"
            )
        ],
        2,
        RTX_4090,
    ),
    "many gated tiles": lambda: case_of(
        [
            product(
                matrix(8192, 960, (5, 32), (4, 128)),
                matrix(8192, 960, (3, 64), (2, 32)),
                activation="relu",
            )
        ],
        4,
        (15, H200[1]),
    ),
    "three matrices": lambda: case_of(
        [product(*(matrix(4096, n, (bits, 128)) for n, bits in ((4064, 4), (1000, 6), (64, 3))))],
        1,
        H200,
    ),
    "short chain": lambda: case_of(chain(64, 96, 32), 4, H200),
    "chain in parts": lambda: case_of(chain(2048, 5632, 256), 4, H200),
    "long chain": lambda: case_of(chain(4096, 14336, 1024), 1, H200),
    "gptq chain": lambda: case_of(chain(1024, 2816, 256, zeros=True), 2, RTX_4090),
}
case_named = cache(lambda name: MADE[name]())
every_case = pytest.mark.parametrize("name", MADE)


@every_case
def test_every_panel_of_every_tile_is_met_once_and_in_order(name: str) -> None:
    case = case_named(name)
    for of_product, own in zip(case.products, case.plan.stages, strict=True):
        met: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index in range(own.start, own.stop):
            for step in steps_of(case, index):
                met[step.matrix, step.tile] += range(step.panel, step.panel + step.count)

        panels = list(range(len(of_product.order) // 32))
        tiles = {(i, t) for i, m in enumerate(of_product.matrices) for t in range(len(m.words))}
        assert set(met) == tiles
        assert all(of_tile == panels for of_tile in met.values())


@every_case
def test_codes_and_scales_of_a_step_lie_where_its_panels_have_them(name: str) -> None:
    case = case_named(name)
    for index, of_stage, _ in stages(case):
        panels = [m.panels() for m in of_stage.matrices]
        size = of_stage.matrices[0].scale_words
        for step in steps_of(case, index):
            own = panels[step.matrix][step.panel : step.panel + step.count]
            assert [panel.bits for panel in own] == [step.bits] * step.count
            assert step.codes == 4 * own[0].word
            assert step.scales == [4 * (panel.scales + size * panel.place) for panel in own]


def test_steps_are_full_where_shares_allow_it() -> None:
    uniform, mixed = case_named("one matrix"), case_named("short chain")

    assert {step.count for step in steps_of(uniform, 0)} == {BLOCK_PANELS}
    assert {step.count for index in range(4) for step in steps_of(mixed, index)} == {1}


def test_panels_of_short_groups_make_a_step_together() -> None:
    case = case_of([product(matrix(4096, 4096, (4, 32)))], 1, H200)

    assert {step.count for step in steps_of(case, 0)} == {BLOCK_PANELS}


@every_case
def test_sums_of_a_tile_are_those_that_warps_have_put_there(name: str) -> None:
    case = case_named(name)
    for index, *_ in stages(case):
        put: dict[tuple[int, int], set[tuple[str, int]]] = defaultdict(set)
        for step in steps_of(case, index):
            put[step.block, step.index].add(step.sums)

        expected = {}
        for block, work, _, share in shares_of(case, index):
            expected |= {(block, i): work.summed(i, share) for i in range(work.tiles)}
        assert put == expected


@every_case
def test_warps_have_equal_shares(name: str) -> None:
    case = case_named(name)
    for index, of_stage, stage in stages(case):
        units = Counter[tuple[int, int]]()
        panels = [m.panels() for m in of_stage.matrices]
        for step in steps_of(case, index):
            last = panels[step.matrix][step.panel + step.count - 1]
            ends = not last.rest or step.panel + step.count == len(panels[0])
            units[step.block, step.warp] += ends
        for block, work, _, share in shares_of(case, index):
            if work.tiles == work.each * work.together and stage["parts"] == 1:
                of_warps = [units[block, warp] for warp in range(WARPS)]
                blocks = work.each * sum(share[6 : 6 + work.together])
                assert max(of_warps) - min(of_warps) <= (1 if blocks >= WARPS else BLOCK_PANELS)


@every_case
def test_sums_of_warps_and_parts_have_places_of_their_own(name: str) -> None:
    case = case_named(name)
    tables = {tensor.data_ptr(): tensor for tensor in case.plan.tensors}
    for index, of_stage, stage in stages(case):
        owners = defaultdict(set)
        for step in steps_of(case, index):
            assert step.index < case.plan.argument["tiles"]
            owners[step.block, step.sums].add((step.warp, step.index))
        assert all(len(of_place) == 1 for of_place in owners.values())

        for of, m in zip(stage["of"], of_stage.matrices, strict=False):
            if stage["parts"] > 1:
                partial = tables[of["partial"]]
                assert partial.numel() == len(m.words) * stage["parts"] * case.rows * 32
            arrived = tables[of["arrived"]]
            assert arrived.tolist() == [0] * stage["ctas"]


@every_case
def test_what_a_cta_holds_fits_the_shared_memory(name: str) -> None:
    case = case_named(name)
    argument = case.plan.argument
    x_bytes, places = [], dict[int, int]()
    for index, _, stage in stages(case):
        places[int(stage["share_at"])] = int(stage["words"])
        shares = list(shares_of(case, index))
        assert {len(share) for *_, share in shares} == {stage["words"]}
        room = next(rows for rows in (1, 4) if rows >= case.rows)
        x_bytes.append(stage["length"] * (2 * 32 + 8) * room)
    assert [*places] == [*accumulate(places.values(), initial=0)][:-1]
    assert sum(places.values()) == argument["words"]
    sums = 4 * 32 * case.rows  # bytes of a tile's
    slots, slot = argument["slots"], argument["slot_bytes"]
    step = slot - 16 * case.products[0].matrices[0].scale_words
    assert step in (STEP, STEP // 2)
    assert LEAST_SLOTS <= slots <= MOST_SLOTS * STEP // step
    of_warp = slots * (slot + 8) + 4 * argument["words"]
    assert case.plan.shared == (
        WARPS * of_warp + argument["tiles"] * sums + max(*x_bytes, WARPS * sums)
    )
    assert case.plan.shared + FIXED_SHARED <= case.most_shared


def pointed(plan: LaunchPlan, address: int) -> torch.Tensor:
    return next(tensor for tensor in plan.tensors if tensor.data_ptr() == address)


def test_a_plan_says_what_matrices_are() -> None:
    biased = matrix(64, 50, (4, 32)).cut(40, torch.randn(40).half())
    plain = matrix(64, 96, (6, 64))
    plan = case_of([product(biased, plain)], 1, H200).plan

    first, second, none = plan.argument["stages"][0]["of"]
    assert first["words"] == biased.words.data_ptr()
    assert (first["bias"], second["bias"]) == (biased.bias.data_ptr(), 0)
    assert (first["columns"], first["tiles"], second["columns"]) == (40, 2, 96)
    assert (first["tile_bytes"], second["tile_bytes"]) == (64 * 4 * 4 + 2 * 32, 64 * 6 * 4 + 32)
    assert (none["words"], none["first_cta"]) == (0, NO_CTA)
    assert plan.name == "product<1, false>"


def test_the_first_input_is_brought_to_the_order_of_the_rows() -> None:
    products = chain(64, 96, 32)
    plan = case_of(products, 1, H200).plan

    first, second, *_ = plan.argument["stages"]
    order = products[0].order
    assert torch.equal(pointed(plan, first["place"])[order], torch.arange(len(order)).int())
    assert second["place"] == 0


def test_an_input_in_the_order_of_the_rows_stays_as_it_is() -> None:
    products = chain(64, 96, 32)
    ordered = [replace(products[0], is_ordered=True), *products[1:]]

    plan = case_of(ordered, 1, H200).plan

    assert not plan.argument["stages"]["place"].any()
    assert all(plan.argument["stages"]["to"][:3])
    assert plan.parts == case_of(products, 1, H200).plan.parts


@pytest.mark.parametrize("sums", [False, True])
def test_ctas_put_columns_that_ranks_gather_in_order(sums: bool) -> None:
    boxes = PeerBoxes.__new__(PeerBoxes)  # of which a plan reads nothing
    first, *others = chain(64, 96, 32)
    gathering = replace(first, is_ordered=True, gathers=boxes)
    products = [gathering, replace(others[0], boxes=boxes), *others[1:]] if sums else [gathering]

    plan = case_of(products, 1, H200).plan

    assert plan.meets is sums
    assert plan.name == "product<1, false, true>"
    assert bool(plan.argument["gather"]["sums"]) is sums
    place = pointed(plan, plan.argument["stages"][0]["place"])
    assert torch.equal(place[first.order], torch.arange(64).int())


def test_ctas_that_wait_for_another_gpu_are_all_resident() -> None:
    boxes = PeerBoxes.__new__(PeerBoxes)
    wide = product(matrix(64, 32 * 2000, (4, 32)))
    plans = [
        case_of([replace(wide, is_ordered=True, gathers=gathers)], 1, H200).plan
        for gathers in (None, boxes)
    ]

    assert plans[0].ctas > H200[0] >= plans[1].ctas


def test_a_norm_lies_in_the_order_of_the_rows() -> None:
    norm = NormArgs(weight=torch.randn(64).half(), eps=1e-3)
    normed = replace(product(matrix(64, 32, (4, 32))), norm=norm)
    plan = case_of([normed], 3, H200).plan

    stage = plan.argument["stages"][0]
    assert torch.equal(pointed(plan, stage["norm"]), norm.weight[normed.order])
    assert stage["eps"] == np.float32(1e-3)
    assert plan.name == "product<4, false>"


def test_results_go_where_the_next_product_reads_them() -> None:
    products = chain(64, 96, 32)
    plan = case_of(products, 1, H200).plan

    entries = plan.argument["stages"]
    for stage, of_stage, following in zip(entries, products, products[1:], strict=False):
        y = torch.randn(of_stage.matrices[-1].columns)
        x = torch.empty_like(y)
        x[pointed(plan, stage["to"]).long()] = y
        assert torch.equal(x, y[following.order])
    assert entries[3]["to"] == 0
    assert entries["activation"].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert plan.argument["count"] == 4
    assert pointed(plan, plan.argument["meetings"]).tolist() == [0]


def test_a_plan_can_be_filled_in_more_than_once() -> None:
    plan = case_named("one matrix").plan

    copied = plan.argument.copy()
    copied["stages"][0]["of"][0]["y"] = 7

    assert plan.argument["stages"][0]["of"][0]["y"] == 0


def test_matrices_of_a_product_have_ctas_by_their_size() -> None:
    matrices = [matrix(4096, n, (4, 128)) for n in (4096, 1024, 1024)]

    plan = case_of([product(*matrices)], 1, H200).plan

    assert plan.argument["stages"][0]["of"]["first_cta"].tolist() == [0, 64, 80]
    assert plan.ctas == 96


def test_a_small_matrix_is_divided_by_rows() -> None:
    plan = case_of([product(matrix(4096, 1024, (4, 128)))], 1, H200).plan

    stage = plan.argument["stages"][0]
    assert (stage["parts"], stage["ctas"], plan.ctas) == (4, 32, 128)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("hidden", "mlp", "kv"), [(64, 96, 32), (4096, 14336, 1024)])
def test_ctas_of_a_chain_are_resident_together(
    hidden: int, mlp: int, kv: int, zeros: bool, device: tuple[int, int]
) -> None:
    processors, most_shared = device
    products = chain(hidden, mlp, kv, zeros=zeros)
    for rows in range(1, MOST_ROWS + 1):
        plan = plan_of(products, rows, (processors, most_shared))
        assert plan is None or plan.ctas <= processors
        assert plan is not None or hidden > 64


@pytest.mark.parametrize("device", DEVICES)
def test_a_chain_without_room_has_no_plan(device: tuple[int, int]) -> None:
    processors, most_shared = device
    large = chain(16384, 53248, 1024)

    assert plan_of(large, MOST_ROWS, (processors // 4, most_shared)) is None
    assert plan_of(chain(256, 512, 64), 1, (2, most_shared)) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("k", "columns"), [(28672, 8192), (8192, 28672), (4096, 128256), (64, 32)])
def test_one_product_has_room_for_all_rows(
    k: int, columns: int, zeros: bool, device: tuple[int, int]
) -> None:
    processors, most_shared = device
    of_kind = matrix(k, columns, (4, 128), zeros=zeros)
    for products in ([product(of_kind)], [product(of_kind, of_kind, activation="silu")]):
        for rows in range(1, MOST_ROWS + 1):
            plan = plan_of(products, rows, (processors, most_shared))
            assert plan is not None
            assert plan.shared + FIXED_SHARED <= most_shared
            assert plan.argument["slots"] >= LEAST_SLOTS
            assert plan.argument["stages"][0]["length"] >= min(WARPS, k // 32)  # a panel for each
