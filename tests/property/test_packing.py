"""Packing is the big integer of its definition and loses nothing, whatever the groups."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from exl2flow.kernels import Group
from exl2flow.kernels.reference.ops import TORCH_OPS
from exl2flow.model import QuantizedMatrix

BITS = (8, 6, 5, 4, 3, 2)
GROUP_ROWS = (32, 64, 128)
Groups = tuple[Group, ...]


@st.composite
def group_lists(draw: st.DrawFn) -> Groups:
    """Draw groups of falling bit widths and mixed sizes."""
    widths = sorted(draw(st.lists(st.sampled_from(BITS), min_size=1, max_size=6)), reverse=True)
    groups: list[Group] = []
    row = 0
    for bits in widths:
        rows = draw(st.sampled_from(GROUP_ROWS))
        groups.append(Group(bits=bits, start=row, rows=rows))
        row += rows
    return tuple(groups)


def random_codes(groups: Groups, n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(2**g.bits, (g.rows, n), generator=generator) for g in groups]
    return torch.cat(parts).to(torch.uint8)


def big_integer_words(codes: list[int], bits: int) -> list[int]:
    """Return the words of `sum(code * 2 ** (bits * index))`."""
    total = sum(code << (bits * index) for index, code in enumerate(codes))
    return [(total >> (32 * index)) & 0xFFFFFFFF for index in range(len(codes) * bits // 32)]


@given(groups=group_lists(), columns=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_unpack_inverts_pack(groups: Groups, columns: int, seed: int) -> None:
    codes = random_codes(groups, columns, seed)

    packed = TORCH_OPS.pack(codes, groups)

    assert packed.dtype == torch.int32
    assert packed.shape == (sum(g.rows * g.bits for g in groups) // 32, columns)
    assert torch.equal(TORCH_OPS.unpack(packed, groups), codes)


@given(groups=group_lists(), seed=st.integers(0, 2**32))
def test_packed_words_are_those_of_the_big_integer(groups: Groups, seed: int) -> None:
    codes = random_codes(groups, 2, seed)

    packed = TORCH_OPS.pack(codes, groups)

    for column in range(2):
        expected = [
            word
            for g in groups
            for word in big_integer_words(
                codes[g.start : g.start + g.rows, column].tolist(), g.bits
            )
        ]
        assert [word & 0xFFFFFFFF for word in packed[:, column].tolist()] == expected


@given(bits=st.sampled_from(BITS), rows=st.sampled_from(GROUP_ROWS), fill=st.booleans())
def test_extreme_codes_survive(bits: int, rows: int, fill: bool) -> None:
    groups = (Group(bits=bits, start=0, rows=rows),)
    codes = torch.full((rows, 1), (2**bits - 1) * fill, dtype=torch.uint8)

    packed = TORCH_OPS.pack(codes, groups)

    assert set(packed.flatten().tolist()) == {-1 if fill else 0}
    assert torch.equal(TORCH_OPS.unpack(packed, groups), codes)


@given(groups=group_lists(), seed=st.integers(0, 2**32))
def test_stored_matrix_gives_back_codes_groups_and_order(groups: Groups, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = random_codes(groups, 32, seed)
    scale_codes = torch.randint(16, (len(groups), 32), generator=generator).to(torch.uint8)
    max_scales = torch.rand(len(groups), generator=generator).half()
    perm = torch.randperm(len(codes), generator=generator)

    stored = QuantizedMatrix.encode(
        codes=codes, groups=groups, scale_codes=scale_codes, max_scales=max_scales, perm=perm
    )
    read = QuantizedMatrix.from_tensors("x", stored.to_tensors("x"))

    assert read.groups == groups
    assert torch.equal(read.inverse_perm[perm].long(), torch.arange(len(perm)))
    assert torch.equal(TORCH_OPS.unpack(read.packed, groups), codes)
    scales = TORCH_OPS.decode_scales(scale_codes, max_scales)
    rows = TORCH_OPS.decode(codes, scales, groups)
    assert torch.equal(read.dequantize()[perm], rows)
