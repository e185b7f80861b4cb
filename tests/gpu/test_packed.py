"""Products with packed matrices on the GPU against the decoded matrix."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from pairs import pairs_of

from exl2flow.core.options.config import ConversionConfig
from exl2flow.inference import load_model
from exl2flow.kernels import (
    ACTIVATIONS,
    FusedLinear,
    Group,
    NormArgs,
    PackedMatrix,
    get_ops,
    pack_blocks,
    pack_codes,
    pack_scales,
    pack_zeros,
)
from exl2flow.kernels.cuda import prompts as cuda_prompts
from exl2flow.kernels.interface.packed import decode_packed
from exl2flow.kernels.reference.ops import TORCH_OPS
from exl2flow.model.layers.linear import PackedLinear

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

DEVICE = "cuda"
BITS = (2, 3, 4, 5, 6, 8)
TOLERANCE = 2e-3  # of the norm: fp16 results of fp32 sums


def packed(k: int, n: int, *kinds: tuple[int, int], zeros: bool = False) -> PackedMatrix:
    """Return a matrix of random codes; the last kind of group fills the rest."""
    groups: list[Group] = []
    while (start := sum(group.rows for group in groups)) < k:
        bits, rows = kinds[min(len(groups), len(kinds) - 1)]
        groups.append(Group(bits=bits, start=start, rows=min(rows, k - start)))
    codes = torch.cat(
        [torch.randint(1 << g.bits, (g.rows, n), dtype=torch.uint8, device=DEVICE) for g in groups]
    )
    count, wide = len(groups), -(-n // 32) * 32
    codes = torch.nn.functional.pad(codes, (0, wide - n))
    scale_codes = torch.randint(0, 16, (count, wide), dtype=torch.uint8, device=DEVICE)
    maxima = (torch.rand(count, device=DEVICE) * 0.05 + 1e-5).half()
    found = torch.rand(count, wide, device=DEVICE).half()
    lower = torch.randint(0, 17, (count, wide), device=DEVICE).half()
    scales = pack_zeros(found, lower) if zeros else pack_scales(scale_codes, maxima)
    return PackedMatrix(
        words=pack_blocks(pack_codes(codes, groups), scales, groups),
        has_zeros=zeros,
        groups=tuple(groups),
        order=torch.randperm(k, device=DEVICE),
        columns=n,
    )


def check(matrix: PackedMatrix, rows: int) -> None:
    ops, (k, _) = get_ops(DEVICE), matrix.shape
    x = torch.randn(rows, k, device=DEVICE).half()

    product = FusedLinear(matrices=(matrix,))

    [y], _ = ops.multiply(x, [product])

    expected = x.double() @ decode_packed(matrix).double()
    error = (y.double() - expected).norm() / expected.norm()
    assert error <= TOLERANCE, (matrix.shape, rows, float(error))
    assert torch.equal(ops.multiply(x, [product])[0][0], y)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 40, 64, 70])
@pytest.mark.parametrize("bits", BITS)
def test_every_width_is_multiplied(bits: int, rows: int) -> None:
    check(packed(512, 160, (bits, 32)), rows)
    check(packed(1056, 100, (bits, 128)), rows)


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("shape", [(32, 32), (4096, 4096), (11008, 96), (20000, 64), (96, 33000)])
def test_every_shape_is_multiplied(shape: tuple[int, int], rows: int) -> None:
    k, n = shape
    check(packed(k, n, (6, 32), (6, 128), (5, 64), (4, 32), (4, 96), (4, 256), (3, 64)), rows)


@pytest.mark.parametrize("rows", [1, 4, 11, 33, 64, 65])
def test_gptq_matrices_are_multiplied(rows: int) -> None:
    check(packed(512, 136, (4, 128), zeros=True), rows)
    check(packed(4096, 4096, (4, 32), zeros=True), rows)


@pytest.mark.parametrize("rows", [1, 8, 12, 40, 64, 65])
def test_matrices_that_share_an_order_are_multiplied_together(rows: int) -> None:
    kinds = [(4096, (4, 128)), (1024, (6, 32)), (100, (3, 64)), (64, (8, 128)), (352, (5, 32))]
    matrices = [packed(4096, n, kind) for n, kind in kinds]
    matrices = [replace(matrix, order=matrices[0].order) for matrix in matrices]
    x = torch.randn(rows, 4096, device=DEVICE).half()

    found = [
        y
        for some in (matrices[:3], matrices[3:])
        for y in get_ops(DEVICE).multiply(x, [FusedLinear(matrices=tuple(some))])[0]
    ]

    for matrix, y in zip(matrices, found, strict=True):
        expected = x.double() @ decode_packed(matrix).double()
        assert (y.double() - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.parametrize(
    ("activation", "rows", "shape"),
    pairs_of([*ACTIVATIONS], [1, 8, 16, 17], [(4096, 11008), (11008, 96), (96, 36)]),
)
def test_a_product_gates_another_and_is_added(
    activation: str, rows: int, shape: tuple[int, int]
) -> None:
    k, n = shape
    gate, up = (packed(k, n, kind, (5, 64)) for kind in ((4, 128), (3, 32)))
    gate, up = (
        replace(m.cut(n, torch.randn(n, device=DEVICE).half()), order=gate.order)
        for m in (gate, up)
    )
    x, residual = torch.randn(rows, k, device=DEVICE).half() / 8, torch.randn(rows, n).half()
    residual = residual.to(DEVICE)
    ops = get_ops(DEVICE)

    product = FusedLinear(matrices=(gate, up), activation=activation)
    [gated], _ = ops.multiply(x, [product])
    [added], _ = ops.multiply(x, [FusedLinear(matrices=(up,), adds=True)], residual)

    low, high = (x.double() @ decode_packed(m).double() + m.bias.double() for m in (gate, up))
    expected = ACTIVATIONS[activation](low) * high
    assert (gated.double() - expected).norm() <= TOLERANCE * expected.norm()
    assert (added.double() - high - residual).norm() <= TOLERANCE * (high + residual).norm()
    assert torch.equal(ops.multiply(x, [product])[0][0], gated)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 40, 64, 70])
@pytest.mark.parametrize(("hidden", "mlp"), [(4096, 11008), (512, 1376), (96, 160)])
def test_a_chain_is_what_its_products_are(hidden: int, mlp: int, rows: int) -> None:
    def norm(eps: float) -> NormArgs:
        return NormArgs(weight=torch.rand(hidden, device=DEVICE).half(), eps=eps)

    gate, up = (packed(hidden, mlp, kind, (5, 64)) for kind in ((4, 128), (3, 32)))
    inputs = [packed(hidden, n, (bits, 128)) for n, bits in ((hidden, 4), (64, 6), (32, 2))]
    inputs = [replace(matrix, order=inputs[0].order) for matrix in inputs]
    chain = [
        FusedLinear(matrices=(packed(hidden, hidden, (4, 128), (3, 32)),), adds=True),
        FusedLinear(
            matrices=(gate, replace(up, order=gate.order)), norm=norm(1e-5), activation="silu"
        ),
        FusedLinear(matrices=(packed(mlp, hidden, (6, 32), (4, 128)),), adds=True),
        FusedLinear(matrices=tuple(inputs), norm=norm(1e-6)),
    ]
    x, states = (torch.randn(rows, hidden, device=DEVICE).half() for _ in range(2))

    found, after = get_ops(DEVICE).multiply(x, chain, states)

    expected, grown = TORCH_OPS.multiply(x, chain, states)
    for y, z in zip([*found, after], [*expected, grown], strict=True):
        assert (y.double() - z.double()).norm() <= TOLERANCE * z.double().norm()
    again, after_again = get_ops(DEVICE).multiply(x, chain, states)
    assert all(
        torch.equal(y, z) for y, z in zip([*again, after_again], [*found, after], strict=False)
    )


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32, 40, 64, 70])
@pytest.mark.parametrize(("hidden", "mlp"), [(512, 1376), (96, 160)])
def test_a_chain_may_be_given_rows_in_the_order_of_its_first_matrix(
    hidden: int, mlp: int, rows: int, zeros: bool
) -> None:
    def made(k: int, n: int, *kinds: tuple[int, int]) -> PackedMatrix:
        return packed(k, n, *([(4, 128)] if zeros else kinds), zeros=zeros)

    gate, up = made(hidden, mlp, (4, 128)), made(hidden, mlp, (3, 32), (5, 64))
    out = FusedLinear(matrices=(made(hidden, hidden, (4, 128), (3, 32)),), adds=True)
    weight = torch.rand(hidden, device=DEVICE) / 512  # results of GPTQ matrices stay within fp16
    norm = NormArgs(weight=weight.half(), eps=1e-5)
    others = [
        FusedLinear(matrices=(gate, replace(up, order=gate.order)), norm=norm, activation="silu"),
        FusedLinear(matrices=(made(mlp, hidden, (6, 32), (4, 128)),), adds=True),
        FusedLinear(matrices=(made(hidden, 96, (4, 128)),), norm=norm),
    ]
    x, states = (torch.randn(rows, hidden, device=DEVICE).half() for _ in range(2))
    ops, ordered = get_ops(DEVICE), replace(out, is_ordered=True)

    for behind in (others, []):  # a chain, and a product alone
        found, after = ops.multiply(x[:, out.order].contiguous(), [ordered, *behind], states)

        expected, grown = ops.multiply(x, [out, *behind], states)
        for y, z in zip([*found, after], [*expected, grown], strict=True):
            assert torch.equal(y, z)


@pytest.mark.parametrize("zeros", [False, True])
def test_decoded_values_are_exact(zeros: bool) -> None:
    for bits in (4,) if zeros else BITS:
        matrix = packed(352, 100, (bits, 32), (bits, 128), zeros=zeros)

        assert torch.equal(get_ops(DEVICE).decode_packed(matrix), decode_packed(matrix))


def test_a_loaded_model_stays_quantized_and_says_the_same(llama: ConversionConfig) -> None:
    ids = torch.randint(0, 200, (1, 40))

    on_card, on_cpu = load_model(llama.out, device=DEVICE), load_model(llama.out, device="cpu")

    assert isinstance(on_card.decoder.head.linear, PackedLinear)
    for count in (1, 9, 40):
        found = on_card.decoder.forward(ids[:, :count].to(DEVICE)).cpu()
        expected = on_cpu.decoder.forward(ids[:, :count])
        torch.testing.assert_close(found.softmax(-1), expected.softmax(-1), atol=5e-3, rtol=5e-2)


def both(
    x: torch.Tensor, products: list[FusedLinear], hidden: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield results of kernels and of the twin, the hidden state last."""
    found, states = get_ops(DEVICE).multiply(x, products, hidden)
    expected, grown = TORCH_OPS.multiply(x, products, hidden)
    yield from zip([*found, states], [*expected, grown], strict=True)


def norm_of(d: int, *, centered: bool) -> NormArgs:
    weight, bias = torch.rand(2, d, device=DEVICE).half()
    return NormArgs(weight=weight, bias=bias if centered else None, eps=1e-5, centered=centered)


@pytest.mark.parametrize(
    ("rows", "centered", "before", "after", "multiplier"),
    pairs_of([1, 3, 16, 20, 40], [False, True], [False, True], [True, False], [0.22, 1.0]),
)
def test_chains_of_every_kind_are_what_their_products_are(
    multiplier: float, after: bool, before: bool, centered: bool, rows: int
) -> None:
    hidden, mlp = 512, 1376
    gate, up = packed(hidden, mlp, (4, 128)), packed(hidden, mlp, (3, 32))
    norms = [norm_of(hidden, centered=centered) for _ in range(4)]
    chain = [
        FusedLinear(matrices=(packed(hidden, hidden, (4, 128)),), after=norms[0], adds=True),
        FusedLinear(
            matrices=(gate, replace(up, order=gate.order)), norm=norms[1], activation="silu"
        ),
        FusedLinear(matrices=(packed(mlp, hidden, (5, 64)),), after=norms[2], adds=True),
        FusedLinear(matrices=(packed(hidden, 96, (6, 32)),), norm=norms[3]),
    ]
    chain = [
        replace(
            p,
            norm=p.norm if before else None,
            after=p.after if after else None,
            multiplier=multiplier if p.adds else 1.0,
        )
        for p in chain
    ]
    x, states = (torch.randn(rows, hidden, device=DEVICE).half() / 8 for _ in range(2))

    for y, z in both(x, chain, states):
        assert (y.double() - z.double()).norm() <= 2 * TOLERANCE * z.double().norm()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 29, 64, 70])
@pytest.mark.parametrize(("hidden", "mlp"), [(4096, 11008), (512, 1376)])
def test_matrices_beside_a_gate_read_the_centered_norm_that_it_reads(
    hidden: int, mlp: int, rows: int, zeros: bool
) -> None:
    kinds = [(4, 128), (4, 32), (4, 64)] if zeros else [(4, 128), (3, 32), (6, 64)]
    widths = [mlp, mlp, 128, 64, 96]
    matrices = [packed(hidden, n, kinds[i % 3], zeros=zeros) for i, n in enumerate(widths)]
    weight = torch.rand(hidden, device=DEVICE).half() / 128  # so that GPTQ results fit fp16
    norm = NormArgs(weight=weight, eps=1e-5, centered=True)
    chain = [
        FusedLinear(matrices=(packed(hidden, hidden, (4, 128), zeros=zeros),), adds=True),
        FusedLinear(
            matrices=tuple(replace(m, order=matrices[0].order) for m in matrices),
            norm=norm,
            activation="silu",
        ),
        FusedLinear(matrices=(packed(mlp, hidden, (4, 32), zeros=zeros),), adds=True),
    ]
    x = torch.randn(rows, hidden, device=DEVICE).half() / 8
    states = torch.randn(rows, hidden, device=DEVICE) + torch.arange(rows, device=DEVICE)[:, None]

    for products in (chain, chain[1:]):
        for y, z in both(x, products, states.half()):
            assert (y.double() - z.double()).norm() <= 2 * TOLERANCE * z.double().norm()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 8, 20, 40, 70])
def test_products_without_a_gate_are_activated(activation: str, rows: int) -> None:
    up, down = packed(512, 1376, (4, 128)), packed(1376, 512, (4, 128))
    up = up.cut(1376, torch.randn(1376, device=DEVICE).half())
    norm = norm_of(512, centered=True)
    chain = [
        FusedLinear(matrices=(up,), norm=norm, activation=activation),
        FusedLinear(matrices=(down,), adds=True, multiplier=0.01),
    ]
    x = torch.randn(rows, 512, device=DEVICE).half()

    for y, z in both(x, chain, x):
        assert (y.double() - z.double()).norm() <= 2 * TOLERANCE * z.double().norm()


@pytest.mark.parametrize("kinds", [((2, 32), (8, 32)), ((3, 64), (6, 32)), ((5, 128), (4, 32))])
@pytest.mark.parametrize("shape", [(1056, 100), (4096, 1024), (320, 33000)])
def test_matrices_are_decoded_side_by_side(
    shape: tuple[int, int], kinds: tuple[tuple[int, int], ...]
) -> None:
    k, n = shape
    matrices = [packed(k, n, *kinds), packed(k, n, kinds[0]), packed(k, 64, (4, 32), zeros=True)]
    found = cuda_prompts._decoded(matrices)

    begin = 0
    for matrix in matrices:
        assert torch.equal(found[:, begin : begin + matrix.columns], decode_packed(matrix))
        begin += 32 * len(matrix.words)
