"""Each operation against a naive loop or against numpy's own fp16 arithmetic."""

import numpy as np
import pytest
import torch
from bounds import near
from roundings import whole_groups

from exl2flow.kernels import Group
from exl2flow.kernels.reference.ops import TORCH_OPS, _grid

BITS = (2, 3, 4, 5, 6, 8)
STEPS = 96


def groups_of(*parts: tuple[int, int]) -> tuple[Group, ...]:
    """Return groups from (bits, rows)."""
    starts = np.cumsum([0, *(rows for _, rows in parts)]).tolist()
    return tuple(
        Group(bits=b, start=start, rows=rows)
        for (b, rows), start in zip(parts, starts, strict=False)
    )


def naive_search(
    x: torch.Tensor, bits: int, *, exponent: float = 3.5
) -> tuple[list[int], float, list[float]]:
    """Return scale codes, the stored maximum and all costs of x (r, n), by the formulas."""
    highest, zero = 2**bits - 1, 2 ** (bits - 1)
    base = [(float(x[:, n].abs().max()) + 1e-12) / (highest / 2) for n in range(x.shape[1])]
    largest = max(base)
    levels = [min(16, max(1, round(16 * (b / largest) ** 0.5))) for b in base]  # half to even
    costs = []
    for i in range(STEPS + 1):
        p = 0.70 * (1 - i / STEPS) + 1.20 * (i / STEPS)
        cost = 0.0
        for n, level in enumerate(levels):
            step = (level / 16) ** 2 * largest * p
            for value in x[:, n].tolist():
                code = min(highest - zero, max(-zero, round(value / step)))
                cost += abs(code * step - value) ** exponent
        costs.append(cost)
    p = 0.70 * (1 - costs.index(min(costs)) / STEPS) + 1.20 * (costs.index(min(costs)) / STEPS)
    return [level - 1 for level in levels], float(np.float16(largest * p)), costs


def test_grid_has_97_points_from_070_to_120() -> None:
    grid = _grid(torch.device("cpu"))

    assert grid.shape == (97,)
    assert grid.dtype == torch.float32
    expected = torch.linspace(0.70, 1.20, 97, dtype=torch.float64).float()
    torch.testing.assert_close(grid, expected, rtol=2**-23, atol=0)
    assert (float(grid[0]), float(grid[-1])) == (
        pytest.approx(0.70, abs=1e-7),
        pytest.approx(1.20, abs=1e-7),
    )


@pytest.mark.parametrize("bits", BITS)
def test_search_grid_is_the_naive_loop(bits: int) -> None:
    x = torch.randn(3, 32, 8) * torch.rand(3, 1, 8).square()

    codes, maxima = TORCH_OPS.search_grid(x, whole_groups(x, bits))

    for j in range(3):
        expected_codes, expected_max, costs = naive_search(x[j], bits)
        assert codes[j].tolist() == expected_codes
        assert max(expected_codes) == 15
        # fp32 sums may prefer a grid point whose fp64 cost is equal to six digits
        largest = float(x[j].abs().amax() / ((2**bits - 1) / 2))
        chosen = round((float(maxima[j]) / largest - 0.70) / 0.50 * STEPS)
        assert costs[chosen] <= min(costs) * (1 + 1e-5)
        assert float(maxima[j]) == pytest.approx(expected_max, rel=0.01)


def test_error_is_judged_by_the_power_of_three_and_a_half() -> None:
    x = torch.randn(40, 32, 4)

    _, maxima = TORCH_OPS.search_grid(x, whole_groups(x, 3))

    agreements = {
        exponent: sum(
            float(maxima[j]) == pytest.approx(naive_search(x[j], 3, exponent=exponent)[1], rel=1e-3)
            for j in range(40)
        )
        for exponent in (3.0, 3.5, 4.0)
    }
    assert agreements[3.5] >= 39  # one tie of costs may fall the other way in fp32
    assert max(agreements[3.0], agreements[4.0]) < 30


@pytest.mark.parametrize("rows", [32, 64, 128])
def test_search_does_not_depend_on_neighbours(rows: int) -> None:
    x = torch.randn(4, rows, 1056)  # columns are searched in chunks

    together = TORCH_OPS.search_grid(x, whole_groups(x, 4))

    for j in range(4):
        alone = TORCH_OPS.search_grid(x[j : j + 1], whole_groups(x[j : j + 1], 4))
        assert torch.equal(together[0][j], alone[0][0])
        assert torch.equal(together[1][j], alone[1][0])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12, 1e-9, 1e-6])
def test_all_tiny_groups_give_finite_scales(bits: int, size: float) -> None:
    x = size * torch.randn(1, 32, 8)

    codes, maxima = TORCH_OPS.search_grid(x, whole_groups(x, bits))

    assert maxima.isfinite().all()
    assert int(codes.max()) == 15
    if size == 0:  # all columns are equal: each has the greatest scale
        assert codes.unique().tolist() == [15]
    assert TORCH_OPS.decode_scales(codes, maxima).isfinite().all()


def test_zero_columns_do_not_disturb_the_others() -> None:
    x = torch.randn(1, 64, 8)
    x[:, :, 3] = 0

    codes, maxima = TORCH_OPS.search_grid(x, whole_groups(x, 4))

    others = [n for n in range(8) if n != 3]
    alone_codes, alone_maxima = TORCH_OPS.search_grid(
        x[:, :, others], whole_groups(x[:, :, others], 4)
    )
    assert int(codes[0, 3]) == 0
    assert torch.equal(codes[:, others], alone_codes)
    assert torch.equal(maxima, alone_maxima)


def test_decoder_scales_follow_the_law_for_every_stored_maximum() -> None:
    bits = np.arange(0x7C00, dtype=np.uint16)  # all finite fp16 that are not negative
    maxima = bits.view(np.float16)
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(bits), 1)

    scales = TORCH_OPS.decode_scales(codes, torch.from_numpy(maxima.copy()))

    unit = (maxima.astype(np.float32) / np.float32(256)).astype(np.float16)
    squares = np.arange(1, 17, dtype=np.float32) ** 2
    expected = (unit.astype(np.float32)[:, None] * squares).astype(np.float16)
    assert np.array_equal(scales.numpy().view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize(
    ("stored", "unit"),
    [(0x150A, 0x0051), (0x0150, 0x0001), (0x251F, 0x051F), (0x2A66, 0x0A66), (0x34CD, 0x14CD)],
)
def test_scales_keep_subnormal_numbers(stored: int, unit: int) -> None:
    maxima = torch.tensor([stored], dtype=torch.int16).view(torch.float16)

    scale = TORCH_OPS.decode_scales(torch.zeros(1, 8, dtype=torch.uint8), maxima)

    assert scale.view(torch.int16).tolist() == [[unit] * 8]


def test_maximum_below_the_smallest_subnormal_decodes_to_zero() -> None:
    maxima = torch.tensor([7.5e-6, 7.7e-6]).half()

    scales = TORCH_OPS.decode_scales(torch.zeros(2, 8, dtype=torch.uint8), maxima)

    assert (scales > 0).any(dim=1).tolist() == [False, True]


def test_decode_is_fp16_arithmetic() -> None:
    groups = groups_of((8, 32), (5, 64), (2, 32))
    highest = torch.cat([torch.full((g.rows, 1), 2**g.bits) for g in groups])
    codes = (torch.randint(0, 256, (128, 16)) % highest).to(torch.uint8)
    scales = (torch.rand(3, 16) * torch.tensor([[1e-6], [1e-3], [2.0]])).half()

    matrix = TORCH_OPS.decode(codes, scales, groups)

    for index, g in enumerate(groups):
        steps = codes[g.start : g.start + g.rows].numpy().astype(np.float16) - np.float16(
            2 ** (g.bits - 1)
        )
        expected = steps * scales[index].numpy()
        found = matrix[g.start : g.start + g.rows].numpy()
        assert np.array_equal(found, expected)


def test_zero_point_decodes_to_positive_zero() -> None:
    for bits in BITS:
        codes = torch.full((32, 8), 2 ** (bits - 1), dtype=torch.uint8)

        matrix = TORCH_OPS.decode(codes, torch.ones(1, 8).half(), groups_of((bits, 32)))

        assert matrix.view(torch.int16).unique().tolist() == [0]


def test_round_panel_is_the_naive_loop() -> None:
    rows, upper = torch.randn(32, 6), torch.randn(32, 32).triu() * 0.2
    upper.diagonal().copy_(torch.rand(32) + 0.5)
    scales = torch.tensor([0.1, 0.25, 0.5, 0.5, 1.0, 0.0]).half().float()
    half = torch.tensor([128.0, 8.0, 4.0, 2.0, 16.0, 8.0])

    codes, errors = TORCH_OPS.round_panel(rows.clone(), upper, scales, half)

    w, expected = rows.clone(), torch.zeros_like(rows)
    for r in range(32):
        for n in range(6):
            step = 0.0 if scales[n] == 0 else round(float(w[r, n] / scales[n]))
            code = min(2 * half[n] - 1, max(0, step + half[n]))
            assert int(codes[r, n]) == int(code)
            expected[r, n] = (w[r, n] - ((code - half[n]) * scales[n]).half()) / upper[r, r]
        w[r:] -= torch.outer(upper[r, r:], expected[r])
    torch.testing.assert_close(errors, expected, **near(expected, 32))


def test_scale_codes_pack_low_nibble_first() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 8, 15, 16, 9]], dtype=torch.uint8) - 1

    packed = TORCH_OPS.pack_scales(codes)

    assert packed.dtype == torch.int32
    assert [word & 0xFFFFFFFF for word in packed[0].tolist()] == [0x8FE73210]


def test_unpack_inverts_pack_of_scales() -> None:
    codes = torch.randint(0, 16, (7, 64)).to(torch.uint8)

    packed = TORCH_OPS.pack_scales(codes)

    assert packed.shape == (7, 8)
    assert torch.equal(TORCH_OPS.unpack_scales(packed), codes)


def test_groups_are_packed_one_after_the_other() -> None:
    parts = ((8, 32), (6, 64), (5, 32), (4, 96), (3, 128), (2, 32))
    groups = groups_of(*parts)
    highest = torch.cat([torch.full((g.rows, 1), 2**g.bits) for g in groups])
    codes = (torch.randint(0, 256, (384, 8)) % highest).to(torch.uint8)

    packed = TORCH_OPS.pack(codes, groups)

    word = 0
    for g in groups:
        words = g.rows * g.bits // 32
        alone = TORCH_OPS.pack(codes[g.start : g.start + g.rows], groups_of((g.bits, g.rows)))
        assert torch.equal(packed[word : word + words], alone)
        word += words
    assert packed.shape == (word, 8)
    assert torch.equal(TORCH_OPS.unpack(packed, groups), codes)
