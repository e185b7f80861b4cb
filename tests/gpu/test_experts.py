"""A layer of experts on the GPU against the torch twin."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from expert_banks import bank, some_of
from expert_layers import LAYERS, SMALL

from exl2flow.kernels import RouterRule, get_ops
from exl2flow.kernels.interface.experts import FEW_EXPERT_ROWS
from exl2flow.kernels.reference.ops import TORCH_OPS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

OPS = get_ops("cuda")
TOLERANCE = 3e-3  # of the norm of what the layer adds: fp16 results of fp32 sums


def states(rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows)).half().cuda()


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 3, 8, 17, FEW_EXPERT_ROWS, FEW_EXPERT_ROWS + 1, 300])
@pytest.mark.parametrize("name", LAYERS)
def test_rows_are_what_the_twin_computes(name: str, rows: int) -> None:
    rule, options = LAYERS[name]
    torch.manual_seed(0)
    layer = bank(rule, **options, device="cuda")
    hidden = states(rows, options["size"])

    found = OPS.experts(hidden, layer)

    assert OPS.runs_experts(layer)
    added = TORCH_OPS.experts(hidden, layer).float() - hidden.float()
    error = (found.float() - hidden.float() - added).norm()
    assert error <= TOLERANCE * added.norm()
    assert torch.equal(OPS.experts(hidden, layer), found)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 3, 17, FEW_EXPERT_ROWS, FEW_EXPERT_ROWS + 1, 300])
@pytest.mark.parametrize("name", LAYERS)
def test_some_experts_add_up_what_the_twin_adds_up(name: str, rows: int) -> None:
    rule, options = LAYERS[name]
    torch.manual_seed(0)
    layer = bank(rule, **options, device="cuda")
    hidden, ids = states(rows, options["size"]), range(rule.experts)

    for own in (ids[1::2], ids[::2], ids[-1:]):  # the last one: some rows have none
        part = some_of(layer, own)
        expected, found = TORCH_OPS.experts(hidden, part), OPS.experts(hidden, part)

        assert OPS.runs_experts(part)
        assert found.dtype == torch.float32
        assert (found - expected).norm() <= TOLERANCE * expected.norm()
        assert torch.equal(OPS.experts(hidden, part), found)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [4, 100])
def test_the_host_waits_for_no_route(
    rows: int, without_waiting: Callable[[], AbstractContextManager[None]]
) -> None:
    rule, options = LAYERS["qwen2"]
    whole, hidden = bank(rule, **options, device="cuda"), states(rows, options["size"])
    for layer in (whole, some_of(whole, range(1, rule.experts, 2))):
        expected = OPS.experts(hidden, layer)

        with without_waiting():
            found = OPS.experts(hidden, layer)

        assert torch.equal(found, expected)


@torch.inference_mode()
def test_all_rows_may_choose_the_same_experts() -> None:
    torch.manual_seed(0)
    layer = bank(RouterRule(experts=8, top=2), **SMALL, device="cuda")
    hidden = states(1, SMALL["size"]).expand(FEW_EXPERT_ROWS, -1)

    found = OPS.experts(hidden, layer)

    assert torch.equal(found, OPS.experts(hidden[:2], layer)[:1].expand_as(found))


@torch.inference_mode()
def test_states_that_are_not_finite_end_no_program() -> None:
    torch.manual_seed(0)
    layer = bank(RouterRule(experts=8, top=2, norm=1.0), **SMALL, device="cuda")
    hidden = states(4, SMALL["size"])
    expected = OPS.experts(hidden, layer)
    hidden[1, 0], hidden[2, 1] = torch.nan, torch.inf

    found = OPS.experts(hidden, layer)

    assert torch.allclose(found[[0, 3]], expected[[0, 3]], atol=2e-2)
    assert found[[1, 2]].isnan().any(dim=1).all()
    assert torch.equal(OPS.experts(states(4, SMALL["size"]), layer), expected)
