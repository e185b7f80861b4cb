"""Steps between products against plain arithmetic."""

import math

import pytest
import torch

from exl2flow.kernels import ACTIVATIONS, GATED_ACTIVATIONS, get_ops


def swiglu(gate: float, up: float) -> float:
    """Return what gpt-oss computes, in fp64."""
    gate, up = min(gate, 7.0), min(max(up, -7.0), 7.0)
    return (up + 1) * gate / (1 + math.exp(-1.702 * gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_clamped_swiglu_is_rounded_once(dtype: torch.dtype) -> None:
    points = torch.tensor([-60.0, -7.5, -7.0, -1.0, -0.25, 0.0, 0.5, 3.0, 6.75, 7.0, 7.25, 900.0])
    gate, up = (x.to(dtype) for x in torch.meshgrid(points, points, indexing="ij"))

    found = get_ops("cpu").gated(gate, up, "clamped_swiglu")

    pairs = zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)
    expected = torch.tensor([swiglu(*pair) for pair in pairs], dtype=torch.float64)
    assert found.dtype == dtype
    # the exponent, of up to 60 · 1.702, is rounded; so are four results after it; then to the dtype
    half, own = torch.finfo(torch.float32).eps / 2, torch.finfo(dtype).eps / 2
    bound = {"rtol": (103 + 4) * half + own, "atol": torch.finfo(dtype).tiny}
    torch.testing.assert_close(found.double().flatten(), expected, **bound)


def test_a_clamped_swiglu_has_the_gradient_of_what_is_not_clamped() -> None:
    gate, up = (x.requires_grad_() for x in torch.tensor([[1.0, 8.0, 1.0], [1.0, 1.0, -8.0]]))

    get_ops("cpu").gated(gate, up, "clamped_swiglu").sum().backward()

    assert gate.grad is not None
    assert up.grad is not None
    assert gate.grad.ne(0).tolist() == [True, False, True]
    assert up.grad.ne(0).tolist() == [True, True, False]


def test_what_is_not_a_number_stays_none() -> None:
    nan, one = torch.full((3,), float("nan")), torch.ones(3)

    for gate, up in ((nan, one), (one, nan)):
        assert get_ops("cpu").gated(gate, up, "clamped_swiglu").isnan().all()


def test_an_activation_is_either_of_the_gate_or_of_both() -> None:
    assert not {*ACTIVATIONS} & {*GATED_ACTIVATIONS}
