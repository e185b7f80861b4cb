"""The division of products of 5 to 64 rows among CTAs and warps, walked like a GPU."""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from product_walks import A100, H200, RTX_4090, chain, matrix, parallel, product

from exl2flow.kernels import FusedLinear, NormArgs
from exl2flow.kernels.interface.packed import BLOCK_PANELS
from exl2flow.kernels.plans.batched import LEAST_SLOTS, LIST_HEADER, MOST_SLOTS, plan_of
from exl2flow.kernels.plans.product import FIXED_SHARED, LaunchPlan, kernel_rows
from exl2flow.kernels.plans.shares import STEP, WARPS, slot_bytes

RTX_3060 = (28, 99 << 10)


MADE = {
    "one group": ([product(matrix(32, 32, (4, 32)))], 5, H200),
    "one matrix": ([product(matrix(4096, 4096, (4, 128)))], 16, H200),
    "few columns": ([product(matrix(4064, 40, (8, 128), (3, 96)))], 32, H200),
    "many columns": ([product(matrix(96, 33000, (6, 32), (5, 64)))], 9, H200),
    "short groups": ([product(matrix(8192, 2000, (8, 32), (6, 32)))], 13, H200),
    "wide first groups": ([product(matrix(11008, 4096, (8, 32), (2, 64)))], 32, A100),
    "gptq": ([product(matrix(14336, 1024, (4, 128), zeros=True))], 16, RTX_4090),
    "gated": (
        [
            product(
                matrix(4096, 1390, (5, 32), (4, 128)),
                matrix(4096, 1390, (3, 64), (2, 32)),
                activation="gelu",
            )
        ],
        5,
        H200,
    ),
    "three matrices": (
        [product(*(matrix(4096, n, (bits, 128)) for n, bits in ((4064, 4), (1000, 6), (64, 3))))],
        8,
        H200,
    ),
    "short chain": (chain(64, 96, 32), 16, H200),
    "long chain": (chain(4096, 14336, 1024), 32, H200),
    "few processors": (chain(4096, 14336, 1024), 16, RTX_3060),
    "gptq chain": (chain(1024, 2816, 256, zeros=True), 24, RTX_4090),
    "beside a gate": (parallel(4096, 14336, 1024), 16, H200),
    "48 rows": (chain(4096, 14336, 1024), 37, A100),
    "64 rows": (chain(4096, 11008, 4096), 64, H200),
    "64 rows, little memory": (chain(4096, 11008, 4096), 49, RTX_4090),
    "gptq chain of 64 rows": (chain(4096, 14336, 1024, zeros=True), 64, H200),
}
every_case = pytest.mark.parametrize("name", MADE)


@cache
def made(name: str) -> tuple[list[FusedLinear], int, tuple[int, int], LaunchPlan]:
    products, rows, (processors, most_shared) = MADE[name]
    plan = plan_of(products, rows, (processors, most_shared))
    assert plan is not None
    return products, rows, (processors, most_shared), plan


def pointed(plan: LaunchPlan, address: int) -> torch.Tensor:
    return next(tensor for tensor in plan.tensors if tensor.data_ptr() == address)


def lists(plan: LaunchPlan, stage: np.void, of: np.void) -> list[list[int]]:
    """Return the lists of a matrix's parts: header, places of rows, steps up to the last one."""
    found = []
    for row in pointed(plan, of["lists"]).tolist():
        assert len(row) == stage["words"]
        first = LIST_HEADER + (32 * row[1] if stage["gathers"] else 0)
        last = next(i for i in range(first, len(row)) if row[i] >> 7 & 1)
        found.append([*row[:LIST_HEADER], *row[first : last + 1]])
    return found


def warps(plan: LaunchPlan, of: np.void) -> dict[tuple[int, int], list[int]]:
    """Return the parts that warps have of each tile: see `Work` in batched.cu."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for cta in range(of["ctas"]):
        for warp in range(WARPS):
            tile = (cta // of["parts"] * WARPS + warp) * of["each"]
            for own in range(tile, min(tile + of["each"], of["tiles"])):
                found[int(own), cta % of["parts"]].append(warp)
    return found


@every_case
def test_every_part_of_every_tile_has_one_warp(name: str) -> None:
    products, _, (processors, _), plan = made(name)
    assert plan.ctas == processors
    for stage, of_stage in zip(plan.argument["stages"], products, strict=False):
        used = Counter[int]()
        for of, m in zip(stage["of"], of_stage.matrices, strict=False):
            own = warps(plan, of)
            assert set(own) == {(t, p) for t in range(len(m.words)) for p in range(of["parts"])}
            assert all(len(of_part) == 1 for of_part in own.values())
            used.update(range(of["first_cta"], of["first_cta"] + of["ctas"]))
        assert set(used.values()) == {1}
        assert max(used) < processors


@every_case
def test_lists_have_all_panels_with_their_codes_and_scales(name: str) -> None:
    products, _, _, plan = made(name)
    for stage, of_stage in zip(plan.argument["stages"], products, strict=False):
        for of, m in zip(stage["of"], of_stage.matrices, strict=False):
            panels, met = m.panels(), 0
            for first, count, at, *steps in lists(plan, stage, of):
                assert first == met
                for step in steps:
                    bits, number, rest = step & 15, step >> 4 & 7, step >> 16 & 3
                    groups, scales = (step >> 18 & 3) + 1, at + (number + rest) * bits * 128
                    assert number <= BLOCK_PANELS
                    assert number * bits * 128 <= STEP
                    for i in range(number):
                        panel, place = panels[met + i], step >> 8 + 2 * i & 3
                        assert (panel.bits, 4 * panel.word) == (bits, at + i * bits * 128)
                        own = 4 * (panel.scales + m.scale_words * panel.place)
                        assert own == scales + 4 * m.scale_words * place
                        assert (panel.groups, panel.place) == (groups, place)
                    at += number * bits * 128 + (0 if rest else 4 * m.scale_words * groups)
                    met += number
                assert met == first + count
            assert met == len(panels)


@every_case
def test_parts_have_about_equal_bytes(name: str) -> None:
    products, _, _, plan = made(name)
    for stage, of_stage in zip(plan.argument["stages"], products, strict=False):
        for of, m in zip(stage["of"], of_stage.matrices, strict=False):
            begins = [at for _, _, at, *_ in lists(plan, stage, of)]
            sizes = [b - a for a, b in pairwise([*begins, int(of["tile_bytes"])])]
            largest = 128 * max(panel.bits + m.scale_words // 32 * 4 + 1 for panel in m.panels())
            assert max(sizes) <= sum(sizes) / len(sizes) + 2 * largest


@every_case
def test_what_a_cta_holds_fits_the_shared_memory(name: str) -> None:
    products, rows, (_, most_shared), plan = made(name)
    argument, held = plan.argument, kernel_rows(rows)
    at, most = 0, 0
    for stage, of_stage in zip(argument["stages"], products, strict=False):
        assert stage["list_at"] == at
        at += stage["words"]
        for of, _ in zip(stage["of"], of_stage.matrices, strict=False):
            most = max(most, *(count for _, count, *_ in lists(plan, stage, of)))
    assert argument["x_bytes"] == 64 * held * most
    assert LEAST_SLOTS <= argument["slots"] <= MOST_SLOTS
    slots = WARPS * argument["slots"] * (slot_bytes(products[0].matrices[0]) + 8)
    assert plan.shared == argument["x_bytes"] + slots + 4 * at
    assert plan.shared + FIXED_SHARED <= most_shared


@every_case
def test_sums_and_squares_have_places_of_their_own(name: str) -> None:
    products, rows, _, plan = made(name)
    scratch, held = plan.tensors[1], kernel_rows(rows)
    begin, end = scratch.data_ptr(), scratch.data_ptr() + scratch.nbytes
    for stage, of_stage in zip(plan.argument["stages"], products, strict=False):
        places = [
            (int(of["partial"]), int(of["partial"] + 128 * held * of["tiles"] * of["parts"]))
            for of, _ in zip(stage["of"], of_stage.matrices, strict=False)
        ]
        places += [
            (int(stage[name]), int(stage[name] + kept * rows * stage["of"][0]["tiles"]))
            for kept in [8 if stage["totals"] else 4]
            for name in ("squared", "summed")
            if stage[name]
        ]
        assert all(first % 16 == 0 and begin <= first < last <= end for first, last in places)
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(places)))


def test_most_warps_of_a_large_chain_have_work() -> None:
    products, *_, plan = made("long chain")
    for stage, of_stage in zip(plan.argument["stages"], products, strict=False):
        entries = [of for of, _ in zip(stage["of"], of_stage.matrices, strict=False)]
        whole = sum(int(of["tiles"]) * int(of["tile_bytes"]) for of in entries)
        most = max(int(of["each"]) * int(of["tile_bytes"]) / int(of["parts"]) for of in entries)
        assert most <= 1.4 * whole / (plan.ctas * WARPS)


def test_the_first_x_is_gathered_by_the_lists() -> None:
    products, *_, plan = made("long chain")
    stage, order = plan.argument["stages"][0], products[0].order
    found = []
    for row in pointed(plan, stage["of"][0]["lists"]).tolist():
        found += row[LIST_HEADER : LIST_HEADER + 32 * row[1]]
    assert found == order.tolist()
    assert not plan.argument["stages"]["gathers"][1:].any()


def test_x_in_the_order_of_the_rows_is_not_gathered() -> None:
    products, rows, limits, plan = made("long chain")
    ordered = plan_of([replace(products[0], is_ordered=True), *products[1:]], rows, limits)
    assert ordered is not None

    stage, gathering = ordered.argument["stages"][0], plan.argument["stages"][0]

    assert not ordered.argument["stages"]["gathers"].any()
    assert stage["words"] < gathering["words"]
    found, expected = (
        lists(ordered, stage, stage["of"][0]),
        lists(plan, gathering, gathering["of"][0]),
    )
    assert found == expected


def test_results_and_norms_are_in_the_order_of_the_product_behind() -> None:
    products = chain(64, 96, 32)
    norm, after = (NormArgs(weight=torch.randn(64).half(), eps=eps) for eps in (1e-3, 1e-4))
    products[0] = replace(products[0], after=after, multiplier=0.5)
    products[1] = replace(products[1], norm=norm)
    products[3] = replace(products[3], norm=norm)
    plan = plan_of(products, 9, H200)
    assert plan is not None

    stages = plan.argument["stages"]
    for stage, of_stage, following in zip(stages, products, products[1:], strict=False):
        y = torch.randn(of_stage.matrices[-1].columns)
        x = torch.empty_like(y)
        x[pointed(plan, stage["to"]).long()] = y
        assert torch.equal(x, y[following.order])
    for index in (1, 3):
        assert torch.equal(pointed(plan, stages[index]["norm"]), norm.weight[products[index].order])
        assert stages[index]["eps"] == np.float32(1e-3)
    assert stages[0]["after"] == after.weight.data_ptr()
    assert stages[1]["squares"] == stages[0]["summed"] != stages[0]["squared"]
    assert stages[3]["squares"] == stages[2]["squared"]
    assert not any(stages[index]["squared"] for index in (1, 3))


def test_x_that_does_not_fit_has_no_plan() -> None:
    products = chain(8192, 28672, 1024)
    for processors, most_shared in (RTX_3060, (2, H200[1])):
        assert plan_of(products, 32, (processors, most_shared)) is None
