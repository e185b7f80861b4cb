"""Norms and rotation of a decoding step on the GPU against the torch twins."""

import pytest
import torch

from exl2flow.kernels import get_ops
from exl2flow.kernels.torch_ops import TORCH_OPS

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.mark.parametrize("d", [8, 64, 100, 4096, 28672])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (0, 4)])
def test_rows_are_normed(shape: tuple[int, int], d: int) -> None:
    x, weight = torch.randn(*shape, d, device=DEVICE).half(), torch.rand(d, device=DEVICE).half()

    found = get_ops(DEVICE).rms_norm(x, weight, 1e-5)

    torch.testing.assert_close(found, TORCH_OPS.rms_norm(x, weight, 1e-5), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (128, 64), (96, 16), (256, 128)])
@pytest.mark.parametrize("per_row", [False, True])
def test_heads_are_rotated(head_dim: int, half: int, per_row: bool) -> None:
    b, heads, t = 3, 5, 1 if per_row else 9
    x = torch.randn(b, t, heads, head_dim, device=DEVICE).half().transpose(1, 2)
    angles = torch.rand(*((b, 1, t, half) if per_row else (t, half)), device=DEVICE) * 6
    cos, sin = angles.cos(), angles.sin()

    for heads_of in (x, x.contiguous(), x[..., :4, :, :]):
        found = get_ops(DEVICE).rotate(heads_of, cos, sin)

        assert torch.equal(found, TORCH_OPS.rotate(heads_of, cos, sin))


def test_what_needs_gradients_is_left_to_torch() -> None:
    ops, x = get_ops(DEVICE), torch.randn(1, 2, 3, 64, device=DEVICE).half().requires_grad_()
    weight, angles = torch.ones(64, device=DEVICE).half(), torch.rand(3, 32, device=DEVICE)

    normed = ops.rms_norm(x, weight, 1e-5)
    ops.rotate(normed, angles.cos(), angles.sin()).float().sum().backward()

    assert x.grad is not None


@pytest.mark.parametrize("rows", [1, 16, 17, 100])
@pytest.mark.parametrize("d", [96, 4096, 11008, 100, 28672])
def test_places_are_put_in_another_order(rows: int, d: int) -> None:
    x, order = torch.randn(rows, d, device="cuda").half(), torch.randperm(d, device="cuda")

    found = get_ops("cuda").reordered(x, order)

    assert torch.equal(found, x[:, order])
