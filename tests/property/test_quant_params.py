"""Groups cover every row once, and predicted bits are stored bits, for any parameters."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from exl2flow.core.store.files import tensor_bytes
from exl2flow.model import QuantizedMatrix, QuantParams
from exl2flow.model.files.exl2 import quantized_layout

BITS = (8, 6, 5, 4, 3, 2)
TWENTIETHS = 20


@st.composite
def quant_params(draw: st.DrawFn) -> QuantParams:
    """Draw parameters of one to three bit widths, shares in twentieths that sum to exactly 1."""
    widths = sorted(draw(st.sets(st.sampled_from(BITS), min_size=1, max_size=3)), reverse=True)
    shares = [draw(st.integers(1, 8)) / TWENTIETHS for _ in widths[1:]]
    shares.append(1.0 - sum(shares))
    if sum(shares) != 1.0:  # a double may fall beside 1
        shares = [1.0] + [0.0] * (len(widths) - 1)
    sizes = [draw(st.sampled_from((32, 64, 96, 128))) for _ in widths]
    return QuantParams(
        bit_widths=tuple(widths), proportions=tuple(shares), group_sizes=tuple(sizes)
    )


ROWS = st.integers(1, 700).map(lambda units: 32 * units)


@given(params=quant_params(), k=ROWS)
def test_groups_cover_all_rows_in_order(params: QuantParams, k: int) -> None:
    groups = params.groups(k)

    row = 0
    for group in groups:
        assert group.start == row
        assert (
            0
            < group.rows
            <= dict(zip(params.bit_widths, params.group_sizes, strict=True))[group.bits]
        )
        assert group.rows % 32 == 0
        row += group.rows
    assert row == k
    widths = [group.bits for group in groups]
    assert widths == sorted(widths, reverse=True)


@given(params=quant_params(), k=ROWS)
def test_group_counts_follow_the_formula(params: QuantParams, k: int) -> None:
    found = {bits: 0 for bits in params.bit_widths}
    for group in params.groups(k):
        found[group.bits] += 1

    rest = k
    expected = {}
    parts = zip(params.bit_widths, params.proportions, params.group_sizes, strict=True)
    for bits, share, size in parts:
        expected[bits] = max(0, math.ceil(min(k * share, rest) / size))
        rest -= expected[bits] * size
    assert rest <= 0
    assert found == expected


@given(params=quant_params(), units=st.integers(1, 24), columns=st.integers(1, 3))
def test_bits_predicted_are_bits_and_bytes_stored(
    params: QuantParams, units: int, columns: int
) -> None:
    k, n = 32 * units, 32 * columns
    groups = params.groups(k)
    matrix = QuantizedMatrix.encode(
        codes=torch.zeros(k, n, dtype=torch.uint8),
        groups=groups,
        scale_codes=torch.zeros(len(groups), n, dtype=torch.uint8),
        max_scales=torch.zeros(len(groups), dtype=torch.float16),
        perm=torch.randperm(k),
    )

    tensors = matrix.to_tensors("x")

    layout = quantized_layout("x", params, k, n, has_bias=False)
    assert layout == {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    stored = sum(8 * len(tensor_bytes(tensor)) for tensor in tensors.values())
    assert stored == matrix.total_bits == params.total_bits(k, n)


@given(params=quant_params())
def test_json_round_trip_keeps_parameters(params: QuantParams) -> None:
    assert QuantParams.from_json(params.to_json()) == params
