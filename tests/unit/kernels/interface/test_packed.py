"""The layout of matrices on a GPU, and the torch twins of the kernels that read it."""

from dataclasses import replace

import pytest
import torch
from bounds import near
from torch.nn.functional import layer_norm, rms_norm

from exl2flow.kernels import ACTIVATIONS, FusedLinear, Group, NormArgs, PackedMatrix, get_ops
from exl2flow.kernels.interface import packed
from exl2flow.kernels.interface.packed import (
    BLOCK_PANELS,
    BLOCK_WORDS,
    SCALE_WORDS,
    decoded_scales,
    laid_panels,
    pack_blocks,
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
        words=pack_blocks(pack_codes(codes, groups), pack_scales(scale_codes, maxima), groups),
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


@pytest.mark.parametrize("most", [1, packed.MOST_CODES])
def test_codes_come_back(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MOST_CODES", most)
    matrix, codes, _, _ = exl2()

    assert torch.equal(unpack_codes(matrix), codes)


@pytest.mark.parametrize("scale_words", [8, 32])
def test_blocks_fill_a_tile_with_the_scales_of_their_panels_behind_the_codes(
    scale_words: int,
) -> None:
    groups = groups_of(*MIXED, (4, 32), (5, 128), (2, 256))
    panels, word, index = laid_panels(groups, scale_words), 0, 0
    of_rows = [(g.bits, i) for i, g in enumerate(groups) for _ in range(g.rows // 32)]
    assert [(panel.bits, panel.group) for panel in panels] == of_rows
    while index < len(panels):
        block = panels[index : index + 1 + panels[index].rest]
        bits, first = block[0].bits, block[0].group
        assert {panel.bits for panel in block} == {bits}
        assert len(block) <= BLOCK_PANELS
        assert 32 * bits * len(block) <= BLOCK_WORDS
        for i, panel in enumerate(block):
            assert (panel.word, panel.rest) == (word + 32 * bits * i, len(block) - 1 - i)
            assert panel.scales == word + 32 * bits * len(block)
            assert (panel.place, panel.groups) == (panel.group - first, block[-1].group + 1 - first)
        word, index = block[0].scales + scale_words * block[0].groups, index + len(block)


def test_a_group_of_several_blocks_has_its_scales_in_each() -> None:
    groups = groups_of((8, 160), (5, 128))
    codes, scales = random_codes(groups, 32), torch.randint(0, 1 << 16, (1, 2, 8)).int()

    words = pack_blocks(pack_codes(codes, groups), scales, groups)

    blocks = {panel.scales: panel for panel in laid_panels(groups, SCALE_WORDS)}
    assert [panel.group for panel in blocks.values()] == [0, 0, 0, 1, 1]
    for at, panel in blocks.items():
        assert torch.equal(words[0, at : at + SCALE_WORDS], scales[0, panel.group])
    assert words.shape[1] == 8 * 160 + 5 * 128 + 5 * SCALE_WORDS


def test_words_of_a_file_are_laid_out_in_whole_tiles() -> None:
    groups = groups_of(*MIXED)
    codes, scales = random_codes(groups, 40), torch.randint(0, 99, (2, len(MIXED), 8)).int()

    found = OPS.lay_out(OPS.pack(codes, groups), groups, scales)

    first = pack_codes(codes[:, :32].contiguous(), groups)
    assert torch.equal(found[:1], pack_blocks(first, scales[:1], groups))
    rest = torch.zeros(len(codes), 32, dtype=torch.uint8)
    rest[:, :8] = codes[:, 32:]
    assert torch.equal(found[1:], pack_blocks(pack_codes(rest, groups), scales[1:], groups))


def test_rows_of_a_file_are_laid_out_in_another_order() -> None:
    groups, order = groups_of((4, 128), (4, 64)), torch.randperm(192)
    codes, scales = random_codes(groups, 32), torch.randint(0, 99, (1, 2, 8, 4)).int()
    words = OPS.pack(codes, groups_of((4, 192)))

    found = OPS.lay_out(words, groups, scales, order)

    assert torch.equal(found, pack_blocks(pack_codes(codes[order], groups), scales, groups))


def test_scales_of_a_file_are_laid_out_in_whole_tiles() -> None:
    codes, maxima = torch.randint(0, 16, (3, 40), dtype=torch.uint8), torch.rand(3).half()

    found = OPS.lay_out_scales(OPS.pack_scales(codes), maxima)

    assert torch.equal(found[:1], pack_scales(codes[:, :32].contiguous(), maxima))
    assert torch.equal(
        found[1:, :, :], pack_scales(torch.nn.functional.pad(codes[:, 32:], (0, 24)), maxima)
    )


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
    assert found.shape == (512, 50)
    assert torch.equal(found[matrix.order], expected[:, :50])


def plain(matrix: PackedMatrix) -> torch.Tensor:
    """Return the matrix fp32 (k, columns) with in-features in their own order."""
    return OPS.decode_packed(matrix).float()


def of_order(order: torch.Tensor, *, n: int = 64, bias: bool = False) -> PackedMatrix:
    found = replace(exl2(n)[0], order=order)
    return found.cut(n, torch.randn(n).half()) if bias else found


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare results of fp32 sums that are held as fp16, some of them in between."""
    bound = near(expected.float(), 1, dtype=torch.float16)
    torch.testing.assert_close(found.float(), expected.float(), **bound)


def test_in_features_meet_the_rows_that_are_theirs() -> None:
    matrix, codes, scale_codes, maxima = exl2()
    x = torch.randn(3, len(matrix.order)).half()

    [y], last = OPS.multiply(x, [FusedLinear(matrices=(matrix,))])

    by_row = OPS.decode(codes, OPS.decode_scales(scale_codes, maxima), matrix.groups)
    close(y, x[:, matrix.order].float() @ by_row.float())
    assert last is y


def test_matrices_of_a_product_share_what_is_normalized() -> None:
    order = torch.randperm(512)
    matrices = (of_order(order), of_order(order, n=32, bias=True))
    x, norm = torch.randn(3, 512).half(), NormArgs(weight=torch.rand(512).half(), eps=1e-2)
    product = FusedLinear(matrices=matrices, norm=norm)

    found, _ = OPS.multiply(x, [product])

    normed = OPS.norm(x, norm).float()
    for y, matrix in zip(found, matrices, strict=True):
        close(y, normed @ plain(matrix) + (0 if matrix.bias is None else matrix.bias))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_first_matrix_gates_the_second(activation: str) -> None:
    order = torch.randperm(512)
    gate, up = of_order(order, bias=True), of_order(order)
    x = torch.randn(3, 512).half() / 8
    product = FusedLinear(matrices=(gate, up), activation=activation)

    [y], _ = OPS.multiply(x, [product])

    low = x.float() @ plain(gate) + gate.bias.float()
    close(y, ACTIVATIONS[activation](low) * (x.float() @ plain(up)))


@pytest.mark.parametrize("has_hidden", [False, True])
def test_a_chain_goes_on_with_what_comes_out(has_hidden: bool) -> None:
    first, second, third = (of_order(torch.randperm(512), n=512) for _ in range(3))
    x, hidden = torch.randn(3, 512).half() / 64, torch.randn(3, 512)
    norm = NormArgs(weight=torch.rand(512).half(), eps=1e-5)
    chain = [
        FusedLinear(matrices=(first,), adds=True),
        FusedLinear(matrices=(second,), norm=norm),
        FusedLinear(matrices=(third,), adds=True),
    ]

    [y], last = OPS.multiply(x, chain, hidden.half() if has_hidden else None)

    states = x.float() @ plain(first) + (hidden if has_hidden else 0)
    between = OPS.norm(states.half(), norm).float() @ plain(second)
    expected = states + between @ plain(third)
    assert last is y
    assert (y.float() - expected).norm() <= 2e-3 * expected.norm()


def test_a_chain_may_be_given_rows_in_the_order_of_its_first_matrix() -> None:
    first, second = (of_order(torch.randperm(512), n=512) for _ in range(2))
    x, hidden = torch.randn(3, 512).half() / 64, torch.randn(3, 512).half()
    chain = [FusedLinear(matrices=(first,), adds=True), FusedLinear(matrices=(second,))]
    ordered = [replace(chain[0], is_ordered=True), chain[1]]

    [y], last = OPS.multiply(x[:, first.order], ordered, hidden)

    [expected], states = OPS.multiply(x, chain, hidden)
    assert torch.equal(y, expected)
    assert torch.equal(last, states)


def test_a_product_that_adds_nothing_leaves_the_hidden_state() -> None:
    matrix, hidden = exl2()[0], torch.randn(3, 64).half()

    [y], last = OPS.multiply(torch.randn(3, 512).half(), [FusedLinear(matrices=(matrix,))], hidden)

    assert last is hidden
    assert y is not hidden


def test_gptq_scales_and_zeros_come_back() -> None:
    groups, n, order = groups_of((4, 128), (4, 64)), 96, torch.randperm(192)
    scales, zeros = torch.rand(2, n).half(), torch.randint(0, 17, (2, n)).half()
    codes = random_codes(groups, n)
    matrix = PackedMatrix(
        words=pack_blocks(pack_codes(codes, groups), pack_zeros(scales, zeros), groups),
        groups=groups,
        order=order,
        columns=n,
        has_zeros=True,
    )

    found = decoded_scales(matrix)

    assert matrix.has_zeros
    assert found[1] is not None
    assert torch.equal(found[0], scales)
    assert torch.equal(found[1], zeros)
    of_row = torch.arange(192) // 128
    expected = (codes.half() - zeros[of_row]) * scales[of_row]
    assert torch.equal(OPS.decode_packed(matrix)[order], expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_matrix_is_activated(activation: str) -> None:
    matrix, x = of_order(torch.randperm(512), bias=True), torch.randn(3, 512).half() / 8

    [y], _ = OPS.multiply(x, [FusedLinear(matrices=(matrix,), activation=activation)])

    close(y, ACTIVATIONS[activation](x.float() @ plain(matrix) + matrix.bias.float()))


def test_relu2_is_a_square() -> None:
    assert OPS.activated(torch.tensor([-3.0, 0.0, 3.0]), "relu2").tolist() == [0.0, 0.0, 9.0]
    assert OPS.gated(torch.tensor([3.0]), torch.tensor([2.0]), "relu2").tolist() == [18.0]


@pytest.mark.parametrize("has_hidden", [False, True])
@pytest.mark.parametrize("centered", [False, True])
def test_what_is_added_is_normed_and_multiplied_before(centered: bool, has_hidden: bool) -> None:
    matrix, x = of_order(torch.randperm(512), n=64), torch.randn(3, 512).half()
    hidden, bias = torch.randn(3, 64).half(), torch.randn(64).half() if centered else None
    after = NormArgs(weight=torch.randn(64).half(), bias=bias, eps=1e-5, centered=centered)
    product = FusedLinear(matrices=(matrix,), after=after, multiplier=0.25, adds=True)

    [y], last = OPS.multiply(x, [product], hidden if has_hidden else None)

    result = x.float() @ plain(matrix)
    if centered:
        added = layer_norm(result, (64,), after.weight.float(), bias.float(), eps=1e-5)
    else:
        added = rms_norm(result, (64,), after.weight.float(), eps=1e-5)
    close(y, added / 4 + (hidden if has_hidden else 0))
    assert last is y
