"""The steps between products on the GPU against the torch twins."""

from dataclasses import replace

import pytest
import torch

from exl2flow.kernels import (
    ACTIVATIONS,
    CACHE_FORMATS,
    GATED_ACTIVATIONS,
    LayerStore,
    NormArgs,
    get_ops,
)
from exl2flow.kernels.cuda import steps as cuda_steps
from exl2flow.kernels.reference.ops import TORCH_OPS

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def layouts(*shape: int) -> list[torch.Tensor]:
    """Return fp16 tensors of a shape: dense, with swapped axes, with gaps, at odd addresses."""
    b, t, heads, d = shape
    dense = torch.randn(*shape, device=DEVICE).half()
    odd = torch.randn(dense.numel() + 1, device=DEVICE).half()[1:].view(shape)
    gaps = torch.randn(b, t + 1, heads, d + 8, device=DEVICE).half()[:, 1:, :, 8:]
    return [dense, dense.view(b, heads, t, d).transpose(1, 2), odd, gaps]


@pytest.mark.parametrize("d", [1, 8, 64, 100, 128, 1024, 1032, 4096, 28672, 32776])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), (0, 4, 1)])
def test_rows_are_normed(shape: tuple[int, int, int], d: int) -> None:
    norm = NormArgs(weight=torch.rand(d, device=DEVICE).half(), eps=1e-5)

    for x in layouts(*shape, d):
        found = get_ops(DEVICE).norm(x, norm)

        torch.testing.assert_close(found, TORCH_OPS.norm(x, norm), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("d", [1, 8, 100, 128, 4096, 28672, 32776])
def test_rows_are_centered_and_biased(d: int, has_bias: bool, centered: bool) -> None:
    weight, bias = torch.randn(2, d, device=DEVICE).half()
    norm = NormArgs(weight=weight, bias=bias if has_bias else None, eps=1e-5, centered=centered)

    for x in layouts(2, 3, 7, d):
        x.add_(3)
        found = get_ops(DEVICE).norm(x, norm)

        # another order of sums may round to the next fp16 number, which is then multiplied
        torch.testing.assert_close(found, TORCH_OPS.norm(x, norm), rtol=4e-3, atol=8e-3)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("d", [64, 100, 128])
def test_heads_have_weights_of_their_own(d: int, centered: bool) -> None:
    for x in layouts(2, 5, 3, d):
        for heads in (x, x.transpose(1, 2)):
            weight = torch.randn(heads.shape[1], d, device=DEVICE).half()
            norm = NormArgs(weight=weight, eps=1e-5, centered=centered)

            found = get_ops(DEVICE).norm(heads, norm)

            torch.testing.assert_close(found, TORCH_OPS.norm(heads, norm), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("multiplier", [1.0, 0.22])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("d", [96, 4096, 100])
def test_normed_rows_are_added(d: int, rows: int, multiplier: float, centered: bool) -> None:
    x, hidden = torch.randn(2, rows, d, device=DEVICE).half()
    bias = torch.randn(d, device=DEVICE).half() if centered else None
    weight = torch.randn(d, device=DEVICE).half()
    norm = NormArgs(weight=weight, bias=bias, eps=1e-5, centered=centered)

    for states in (hidden, None):
        found = cuda_steps.add_normed(x, norm, states, multiplier)

        expected = TORCH_OPS.norm(x, norm).float() * multiplier
        expected = expected if states is None else expected + states
        torch.testing.assert_close(found.float(), expected, rtol=4e-3, atol=8e-3)


def test_heads_without_positions_are_not_rotated() -> None:
    x, none = torch.randn(2, 3, 9, 64, device=DEVICE).half(), torch.zeros(9, 0, device=DEVICE)

    assert torch.equal(get_ops(DEVICE).rotate(x, none, none), x)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("d", [1, 100, 11008])
def test_what_is_not_gated_is_activated(d: int, activation: str) -> None:
    for x in layouts(2, 3, 5, d):
        x.mul_(4)

        found = get_ops(DEVICE).activated(x, activation)

        expected = TORCH_OPS.activated(x, activation)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("head_dim", "half"),
    [(64, 32), (128, 64), (96, 16), (256, 128), (80, 20), (104, 24), (100, 32), (6, 2)],
)
@pytest.mark.parametrize("per_row", [False, True])
def test_heads_are_rotated(head_dim: int, half: int, per_row: bool) -> None:
    b, heads, t = 3, 40, 1 if per_row else 9
    angles = torch.rand(*((b, 1, t, half) if per_row else (t, half)), device=DEVICE) * 6
    cos, sin = angles.cos(), angles.sin()

    for x in layouts(b, heads, t, head_dim):
        for heads_of in (x, x[:, :4]):
            found = get_ops(DEVICE).rotate(heads_of, cos, sin)

            assert torch.equal(found, TORCH_OPS.rotate(heads_of, cos, sin))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED_ACTIVATIONS])
@pytest.mark.parametrize("d", [1, 100, 11008])
def test_gates_open(d: int, activation: str) -> None:
    for gate, up in zip(layouts(2, 3, 5, d), reversed(layouts(2, 3, 5, d)), strict=True):
        gate.mul_(4)
        found = get_ops(DEVICE).gated(gate, up, activation)

        # two fp16 steps; 1 + erf(x) keeps nothing below a step of fp32
        expected = TORCH_OPS.gated(gate, up, activation)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-5)


def test_silu_is_as_exact_as_torch_s() -> None:
    every = torch.arange(-(2**15), 2**15, device=DEVICE).short().view(torch.float16)
    gate = every[every.isfinite()]
    up = torch.ones_like(gate)

    found = get_ops(DEVICE).gated(gate, up, "silu")

    expected = TORCH_OPS.gated(gate, up, "silu")
    steps = found.view(torch.int16).int() - expected.view(torch.int16).int()
    assert steps.abs().max() <= 1


def test_what_is_not_a_number_stays_none() -> None:
    gate = torch.full((8,), float("nan"), device=DEVICE).half()
    for activation in ACTIVATIONS:
        assert get_ops(DEVICE).gated(gate, torch.ones_like(gate), activation).isnan().all()
        assert get_ops(DEVICE).activated(gate, activation).isnan().all()
    for activation in GATED_ACTIVATIONS:
        for x in ((gate, torch.ones_like(gate)), (torch.ones_like(gate), gate)):
            assert get_ops(DEVICE).gated(*x, activation).isnan().all()


def test_what_needs_gradients_is_left_to_torch() -> None:
    ops, x = get_ops(DEVICE), torch.randn(1, 2, 3, 64, device=DEVICE).half().requires_grad_()
    norm = NormArgs(weight=torch.ones(64, device=DEVICE).half(), eps=1e-5)
    angles = torch.rand(3, 32, device=DEVICE)

    normed = ops.gated(ops.norm(x, norm), x, "silu")
    centered = ops.norm(ops.activated(normed, "relu2"), replace(norm, centered=True))
    ops.rotate(centered, angles.cos(), angles.sin()).float().sum().backward()

    assert x.grad is not None


@pytest.mark.parametrize("d", [128, 100])
def test_columns_of_a_wider_result_are_read_where_they_are(d: int) -> None:
    wide = torch.randn(7, 5 * d + 8, device=DEVICE).half()
    x, gate = wide[:, d : 3 * d].view(1, 7, 2, d).transpose(1, 2), wide[:, : 2 * d]
    angles, up = torch.rand(2, 7, d // 2, device=DEVICE), wide[:, 3 * d : 5 * d]
    store = LayerStore.empty(CACHE_FORMATS["fp16"], pages=1, kv_heads=2, head_dim=d, device=DEVICE)
    slots, ops = torch.arange(9, 16, device=DEVICE), get_ops(DEVICE)

    rotated, gated = ops.rotate(x, *angles), ops.gated(gate, up, "silu")
    rows = x[0].transpose(0, 1)
    ops.write_cache(store, slots, rows, rows)

    assert rotated.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(rotated, TORCH_OPS.rotate(x, *angles), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(gated, TORCH_OPS.gated(gate, up, "silu"), rtol=4e-3, atol=1e-3)
    for where in (slots, slice(9, 16)):
        for held in ops.read_cache(store, where):
            assert torch.equal(held, rows)


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("d", [64, 128, 100])
def test_attention_to_two_sets_is_joined(d: int, heads: int) -> None:
    a, b = torch.randn(2, 1, 33, heads, d, device=DEVICE).half().transpose(2, 3)
    sums = 10 * torch.randn(2, 1, heads, 33, device=DEVICE)

    found, of_both = get_ops(DEVICE).joined(a, b, *sums)

    expected, exact = TORCH_OPS.joined(a, b, *sums)
    assert found.stride() == a.stride()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(of_both, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("multiplier", [1.0, 0.22, 45.25])
@pytest.mark.parametrize("d", [8, 100, 4096, 5120])
def test_rows_of_ids_are_looked_up(d: int, multiplier: float) -> None:
    table = torch.randn(50, d, device=DEVICE).half()
    ids = torch.randint(-3, 55, (6, 9), device=DEVICE)

    for some in (ids, ids[:4, :5], ids[:1, :1], ids[:0]):
        found = get_ops(DEVICE).embed(some, table, multiplier)

        assert torch.equal(found, TORCH_OPS.embed(some, table, multiplier))


@pytest.mark.parametrize("count", [1, 8])
def test_new_tokens_have_positions_and_slots(count: int) -> None:
    tables = torch.randperm(60, device=DEVICE).int().view(6, 10)
    lengths = torch.tensor([0, 255, 256, 1000, 2551], device=DEVICE).int()

    found = get_ops(DEVICE).next_slots(tables[:5], lengths, count)

    expected = TORCH_OPS.next_slots(tables[:5], lengths, count)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
