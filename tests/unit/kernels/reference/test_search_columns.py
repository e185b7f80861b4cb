"""The search for every column's scale code, against a naive loop over all candidates."""

import numpy as np
import pytest
import torch
from roundings import whole_groups

from exl2flow.kernels.reference.ops import TORCH_OPS

BITS = (2, 3, 4, 5, 6, 8)
FACTORS = [0.50 + (1.15 - 0.50) * i / 11 for i in range(12)]
Column = tuple[float, int]  # cost, scale code


def decoder_scale(code: int, maximum: np.float16) -> float:
    """Return the scale a decoder uses, in numpy's own fp16 arithmetic."""
    unit = np.float16(np.float32(maximum) / np.float32(256))
    return float(np.float16(np.float32((code + 1) ** 2) * np.float32(unit)))


def column_cost(x: np.ndarray, scale: float, bits: int, weights: np.ndarray) -> float:
    """Return the weighted squared error of a column fp64 (r,) under a scale."""
    steps = np.zeros_like(x) if scale == 0 else np.rint(x / scale)
    error = x - scale * np.clip(steps, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return float((weights * error**2).sum())


def naive_search(
    x: torch.Tensor, bits: int, weights: torch.Tensor
) -> dict[float, tuple[float, list[Column]]]:
    """Return maximum → (total cost, best (cost, code) of each column) for a group x (r, n)."""
    columns, w = x.double().numpy().T, weights.double().numpy()
    base = [(np.abs(column).max() + 1e-12) / ((2**bits - 1) / 2) for column in columns]
    found = {}
    for factor in FACTORS:
        maximum = np.float16(max(base) * factor)
        best = []
        for column, own in zip(columns, base, strict=True):
            middle = 16 * (0.9 * own / float(maximum)) ** 0.5 if maximum > 0 else np.inf
            levels = (min(16, max(1, np.rint(middle) + reach)) for reach in range(-2, 3))
            tried = sorted({int(level) - 1 for level in levels})
            costs = [(column_cost(column, decoder_scale(c, maximum), bits, w), c) for c in tried]
            best.append(min(costs))
        found[float(maximum)] = (sum(cost for cost, _ in best), best)
    return found


def total_cost(
    x: torch.Tensor, bits: int, weights: torch.Tensor, codes: torch.Tensor, maximum: torch.Tensor
) -> float:
    """Return the weighted squared error of a group x (r, n) under codes (n,) and a maximum ()."""
    stored, w = np.float16(maximum.item()), weights.double().numpy()
    return sum(
        column_cost(column, decoder_scale(int(code), stored), bits, w)
        for column, code in zip(x.double().numpy().T, codes, strict=True)
    )


# below 1e-3 the stored maxima and scales are subnormal: their rounding decides
@pytest.mark.parametrize("size", [1.0, 1e-3, 3e-5])
@pytest.mark.parametrize("bits", BITS)
def test_search_is_the_naive_loop(bits: int, size: float) -> None:
    x = size * torch.randn(2, 32, 8) * torch.rand(2, 1, 8).square()
    weights = torch.rand(32) + 0.1

    codes, maxima = TORCH_OPS.search_columns(x, whole_groups(x, bits), weights)

    assert (codes.dtype, maxima.dtype) == (torch.uint8, torch.float16)
    for j in range(2):
        costs = naive_search(x[j], bits, weights)
        total, columns = costs[float(maxima[j])]  # a KeyError: a maximum that is not tried
        least = min(cost for cost, _ in costs.values())
        # fp32 sums of 32 terms: a candidate worse in the sixth digit may win
        assert total <= least * (1 + 1e-5)
        for n, (cost, _) in enumerate(columns):
            own = decoder_scale(int(codes[j, n]), np.float16(maxima[j].item()))
            found = column_cost(x[j, :, n].double().numpy(), own, bits, weights.double().numpy())
            assert found <= cost * (1 + 1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_search_beats_the_grid_in_what_it_judges_by(bits: int) -> None:
    x = torch.randn(4, 64, 32) * torch.rand(4, 1, 32)
    weights = torch.rand(64) + 0.1

    ours = TORCH_OPS.search_columns(x, whole_groups(x, bits), weights)
    grid = TORCH_OPS.search_grid(x, whole_groups(x, bits))

    for j in range(4):
        found, other = (
            total_cost(x[j], bits, weights, codes[j], maxima[j]) for codes, maxima in (ours, grid)
        )
        assert found < other


def test_rows_without_weight_do_not_change_scales() -> None:
    x = torch.randn(2, 64, 8)
    x[:, 32:] *= 0.01  # the range of a column is that of its first half
    other = x.clone()
    other[:, 32:] = 0.01 * torch.randn(2, 32, 8)
    weights = (torch.arange(64) < 32).float()

    found, expected = (
        TORCH_OPS.search_columns(each, whole_groups(each, 3), weights) for each in (other, x)
    )

    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_heavy_rows_are_rounded_better() -> None:
    x = torch.randn(1, 64, 64)
    heavy = torch.ones(64)
    heavy[:4] = 1e4

    def error(weights: torch.Tensor) -> float:
        codes, maxima = TORCH_OPS.search_columns(x, whole_groups(x, 3), weights)
        return total_cost(x[0, :4], 3, torch.ones(4), codes[0], maxima[0])

    assert error(heavy) < 0.8 * error(torch.ones(64))


@pytest.mark.parametrize("rows", [32, 128])
def test_search_does_not_depend_on_neighbours(rows: int) -> None:
    x, weights = torch.randn(3, rows, 520), torch.rand(rows)  # columns are searched in chunks

    together = TORCH_OPS.search_columns(x, whole_groups(x, 4), weights)

    for j in range(3):
        alone = TORCH_OPS.search_columns(x[j : j + 1], whole_groups(x[j : j + 1], 4), weights)
        assert torch.equal(together[0][j], alone[0][0])
        assert torch.equal(together[1][j], alone[1][0])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12, 1e-9, 1e-6])
def test_all_tiny_groups_give_finite_scales(bits: int, size: float) -> None:
    x = size * torch.randn(1, 32, 8)

    codes, maxima = TORCH_OPS.search_columns(x, whole_groups(x, bits), torch.ones(32))

    assert maxima.isfinite().all()
    assert int(codes.max()) <= 15
    assert TORCH_OPS.decode_scales(codes, maxima).isfinite().all()


def test_zero_columns_do_not_disturb_the_others() -> None:
    x = torch.randn(1, 64, 8)
    x[:, :, 3] = 0
    others = [n for n in range(8) if n != 3]

    codes, maxima = TORCH_OPS.search_columns(x, whole_groups(x, 4), torch.ones(64))

    alone_codes, alone_maxima = TORCH_OPS.search_columns(
        x[:, :, others], whole_groups(x[:, :, others], 4), torch.ones(64)
    )
    assert torch.equal(codes[:, others], alone_codes)
    assert torch.equal(maxima, alone_maxima)


@pytest.mark.parametrize("outlier", [1.0, 6.0], ids=["alike", "one far wider"])
def test_some_columns_choose_the_maximum_for_all(outlier: float) -> None:
    x = torch.randn(1, 32, 700) * (0.5 + torch.rand(1, 1, 700))
    x[:, :, 333] *= outlier
    weights = torch.rand(32) + 0.1

    codes, maxima = TORCH_OPS.search_columns(x, whole_groups(x, 4), weights)

    costs = naive_search(x[0], 4, weights)
    total, columns = costs[float(maxima[0])]
    assert total <= 1.02 * min(cost for cost, _ in costs.values())
    found = total_cost(x[0], 4, weights, codes[0], maxima[0])
    assert found == pytest.approx(sum(cost for cost, _ in columns), rel=1e-4)
