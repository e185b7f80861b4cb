"""How a product is divided among CTAs and warps: every panel once, within a device's limits."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from exl2flow.kernels import Group, PackedMatrix
from exl2flow.kernels.product import MOST_PANELS, MOST_STEPS, STEP, Plan, most_rows, plan_of

LARGE, SMALL = 227 << 10, 99 << 10  # bytes of shared memory of an H200, of an RTX 4090


def matrix(k: int, n: int, *kinds: tuple[int, int]) -> PackedMatrix:
    """Return a matrix whose groups repeat these bits and rows, last ones shorter if need be."""
    groups: list[Group] = []
    while (start := sum(group.rows for group in groups)) < k:
        bits, rows = kinds[min(len(groups) * len(kinds) * rows_of(kinds) // k, len(kinds) - 1)]
        groups.append(Group(bits=bits, start=start, rows=min(rows, k - start)))
    words = sum(group.rows * group.bits for group in groups)
    return PackedMatrix(
        codes=torch.zeros(n // 32, words, dtype=torch.int32),
        scales=torch.zeros(n // 32, len(groups), 8, dtype=torch.int32),
        groups=tuple(groups),
        order=torch.arange(k),
        columns=n,
    )


def rows_of(kinds: tuple[tuple[int, int], ...]) -> int:
    return max(rows for _, rows in kinds)


CASES = [
    ((4096, 4096, (4, 128)), 1, LARGE),
    ((11008, 4096, (5, 128), (4, 128)), 1, SMALL),
    ((11008, 4096, (5, 128), (4, 128)), 16, LARGE),
    ((28672, 8192, (3, 64), (2, 64)), 4, SMALL),
    ((28672, 8192, (8, 32), (6, 32)), 13, LARGE),
    ((64, 96, (4, 32)), 3, LARGE),
    ((4064, 32, (8, 128), (3, 96)), 3, SMALL),
]


def planned(case: tuple, rows: int, most_shared: int) -> tuple[PackedMatrix, Plan]:
    found = matrix(case[0], case[1], *case[2:])
    return found, plan_of([found], rows, processors=132, most_shared=most_shared)


@pytest.mark.parametrize(("case", "rows", "most_shared"), CASES)
def test_each_panel_is_fetched_once_and_in_whole_or_one_group(
    case: tuple, rows: int, most_shared: int
) -> None:
    packed, plan = planned(case, rows, most_shared)
    table, bounds = (x.tolist() for x in plan.kept[0][:2])
    panels, length = packed.panels(), int(plan.argument["of"][0]["length"])

    met = []
    for part, of_part in enumerate(bounds):
        for first, stop in pairwise(of_part):
            assert stop - first <= MOST_STEPS
            for codes, scales, row, kind in table[first:stop]:
                bits, count, group = kind & 15, kind >> 4 & 15, kind >> 8 & 15
                begin = part * length + row // 32
                own = panels[begin : begin + count]
                assert 1 <= count <= MOST_PANELS
                assert [p[0] for p in own] == [bits] * count
                assert (codes, scales) == (4 * own[0][1], 32 * own[0][2])
                assert kind >> 12 & 0xFF == 8 * bits * count <= STEP // 16
                assert [p[2] - own[0][2] for p in own] == [i // group for i in range(count)]
                assert kind >> 20 == 2 * (count // group)
                met += range(begin, begin + count)

    assert sorted(met) == list(range(len(panels)))


@pytest.mark.parametrize(("case", "rows", "most_shared"), CASES)
def test_a_plan_stays_within_the_device(case: tuple, rows: int, most_shared: int) -> None:
    packed, plan = planned(case, rows, most_shared)

    assert plan.shared <= most_shared
    ctas, parts = plan.grid
    tiles = -(-len(packed.codes) // (1 if rows <= 8 else 4))
    each = plan.argument["of"][0]["each"]
    assert (ctas - 1) * each < tiles <= ctas * each
    assert parts == 1 or plan.kept[0][2].numel() > 0


def test_matrices_of_a_launch_have_ctas_by_their_size() -> None:
    matrices = [matrix(4096, n, (4, 128)) for n in (4096, 1024, 1024)]

    plan = plan_of(matrices, 1, processors=132, most_shared=LARGE)

    entries = plan.argument["of"]
    assert plan.grid == (96, 1)
    assert entries["first_cta"].tolist() == [0, 64, 80]
    assert entries["codes"].tolist() == [m.codes.data_ptr() for m in matrices]
    copied = plan.argument.copy()
    copied["of"][1]["x"] = 7
    assert (copied["of"][1]["x"], entries[1]["x"]) == (7, 0)


def test_a_small_matrix_is_divided_by_rows() -> None:
    _, plan = planned((4096, 1024, (4, 128)), 1, LARGE)

    assert plan.grid == (32, 4)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("most_shared", [SMALL, LARGE])
def test_as_many_rows_as_are_said_have_room(most_shared: int, has_zeros: bool) -> None:
    packed = matrix(28672, 8192, (4, 128))
    if has_zeros:
        packed = replace(packed, scales=torch.zeros(256, 224, 8, 4, dtype=torch.int32))

    for rows in range(1, most_rows(most_shared, has_zeros=has_zeros) + 1):
        plan = plan_of([packed], rows, processors=132, most_shared=most_shared)
        assert 0 < plan.shared <= most_shared
        assert plan.argument["of"][0]["length"] > 0
