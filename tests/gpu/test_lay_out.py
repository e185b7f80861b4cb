"""The GPU lays out matrices bit for bit like the torch twin."""

import pytest
import torch

from exl2flow.kernels import Group, get_ops
from exl2flow.kernels.reference.ops import TORCH_OPS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

DEVICE = "cuda"
BITS = (2, 3, 4, 5, 6, 8)
COLUMNS = (8, 32, 40, 64, 136, 1000)  # of a file; some fill no whole tile


def groups_of(*kinds: tuple[int, int]) -> tuple[Group, ...]:
    starts = [sum(rows for _, rows in kinds[:i]) for i in range(len(kinds))]
    return tuple(
        Group(bits=bits, start=start, rows=rows)
        for (bits, rows), start in zip(kinds, starts, strict=True)
    )


def random_words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


def check(groups: tuple[Group, ...], n: int) -> None:
    words = random_words(sum(group.rows * group.bits for group in groups) // 32, n)
    scales = random_words(-(-n // 32), len(groups), 8)

    found = get_ops(DEVICE).lay_out(words.to(DEVICE), groups, scales.to(DEVICE))

    assert torch.equal(found.cpu(), TORCH_OPS.lay_out(words, groups, scales))


@pytest.mark.parametrize("n", COLUMNS)
@pytest.mark.parametrize("bits", BITS)
def test_every_width_is_laid_out(bits: int, n: int) -> None:
    check(groups_of((bits, 32)), n)
    check(groups_of((bits, 96), (bits, 32), (bits, 160)), n)


@pytest.mark.parametrize("n", COLUMNS)
def test_groups_of_all_widths_are_laid_out(n: int) -> None:
    check(groups_of((8, 32), (6, 64), (6, 32), (5, 160), (4, 64), (4, 96), (3, 32), (2, 96)), n)


def test_a_large_matrix_is_laid_out() -> None:
    check(groups_of(*[(6, 128)] * 9, *[(5, 128)] * 76, (5, 64)), 4096)


@pytest.mark.parametrize("n", COLUMNS)
def test_rows_are_laid_out_in_another_order(n: int) -> None:
    groups, order = groups_of((4, 128), (4, 128), (4, 64)), torch.randperm(320)
    words, scales = random_words(40, n), random_words(-(-n // 32), len(groups), 8, 4)

    found = get_ops(DEVICE).lay_out(words.to(DEVICE), groups, scales.to(DEVICE), order.to(DEVICE))

    assert torch.equal(found.cpu(), TORCH_OPS.lay_out(words, groups, scales, order))


@pytest.mark.parametrize("n", COLUMNS)
def test_scales_are_laid_out(n: int) -> None:
    words, maxima = random_words(37, n // 8), (torch.rand(37) * 0.1).half()
    maxima[0] = 4e-6  # its unit is subnormal

    found = get_ops(DEVICE).lay_out_scales(words.to(DEVICE), maxima.to(DEVICE))

    assert torch.equal(found.cpu(), TORCH_OPS.lay_out_scales(words, maxima))
