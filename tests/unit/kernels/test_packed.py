"""The layout in which matrices lie on a card, and the torch twins of what reads it."""

import pytest
import torch

from exl2flow.kernels import Group, PackedMatrix, get_ops
from exl2flow.kernels.packed import (
    decoded_scales,
    pack_codes,
    pack_scales,
    pack_zeros,
    places,
    unpack_codes,
)

OPS = get_ops("cpu")
MIXED = [(6, 64), (6, 32), (5, 128), (4, 64), (4, 64), (3, 32), (2, 96), (8, 32)]


def groups_of(*kinds: tuple[int, int]) -> tuple[Group, ...]:
    starts = [sum(rows for _, rows in kinds[:i]) for i in range(len(kinds))]
    return tuple(
        Group(bits=bits, start=start, rows=rows)
        for (bits, rows), start in zip(kinds, starts, strict=True)
    )


def random_codes(groups: tuple[Group, ...], n: int) -> torch.Tensor:
    parts = [torch.randint(0, 1 << g.bits, (g.rows, n), dtype=torch.uint8) for g in groups]
    return torch.cat(parts)


def exl2(n: int = 64) -> tuple[PackedMatrix, torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = groups_of(*MIXED)
    codes, k = random_codes(groups, n), sum(rows for _, rows in MIXED)
    scale_codes = torch.randint(0, 16, (len(groups), n), dtype=torch.uint8)
    maxima = (torch.rand(len(groups)) * 0.1).half()
    maxima[0] = 4e-4  # its unit and small scales are subnormal
    matrix = PackedMatrix(
        codes=pack_codes(codes, groups),
        scales=pack_scales(scale_codes, maxima),
        groups=groups,
        order=torch.randperm(k),
        columns=n,
    )
    return matrix, codes, scale_codes, maxima


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_each_bit_of_a_lane_s_words_has_one_owner(bits: int) -> None:
    owned = [
        (word, place + bit)
        for pieces in places(bits)
        for word, place, _, width in pieces
        for bit in range(width)
    ]

    assert sorted(owned) == [(word, bit) for word in range(bits) for bit in range(32)]


def test_codes_come_back() -> None:
    matrix, codes, _, _ = exl2()

    assert matrix.codes.shape == (2, sum(bits * rows for bits, rows in MIXED))
    assert torch.equal(unpack_codes(matrix), codes)


def test_scales_are_the_decoder_s_subnormal_ones_too() -> None:
    matrix, _, scale_codes, maxima = exl2()

    scales, zeros = decoded_scales(matrix)

    assert zeros is None
    assert torch.equal(scales, OPS.decode_scales(scale_codes, maxima))
    assert 0 < scales[0].float().min() < 6e-5


def test_decoded_columns_are_those_of_the_file() -> None:
    matrix, codes, scale_codes, maxima = exl2()

    found = OPS.decode_packed(matrix.cut(50))

    expected = OPS.decode(codes, OPS.decode_scales(scale_codes, maxima), matrix.groups)
    assert torch.equal(found, expected.T[:50])


def test_rows_are_multiplied_in_the_order_of_the_matrix() -> None:
    matrix, *_ = exl2()
    x = torch.randn(3, len(matrix.order)).half()

    [y] = OPS.multiply(x, [matrix])

    weight = torch.empty(64, len(matrix.order))
    weight[:, matrix.order] = OPS.decode_packed(matrix).float()
    torch.testing.assert_close(y.float(), x.float() @ weight.T, rtol=2e-3, atol=2e-3)


def test_gptq_scales_and_zeros_come_back() -> None:
    groups, n = groups_of((4, 128), (4, 64)), 96
    scales, zeros = torch.rand(2, n).half(), torch.randint(0, 17, (2, n)).half()
    codes = random_codes(groups, n)
    matrix = PackedMatrix(
        codes=pack_codes(codes, groups),
        scales=pack_zeros(scales, zeros),
        groups=groups,
        order=torch.arange(192),
        columns=n,
    )

    found = decoded_scales(matrix)

    assert matrix.has_zeros
    assert found[1] is not None
    assert torch.equal(found[0], scales)
    assert torch.equal(found[1], zeros)
    of_row = torch.arange(192) // 128
    expected = (codes.half() - zeros[of_row]) * scales[of_row]
    assert torch.equal(OPS.decode_packed(matrix), expected.T)
