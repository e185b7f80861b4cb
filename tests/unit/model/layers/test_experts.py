"""Packed experts, all of a layer at once: as one after the other."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packed_models import make_packed, sublayers_of

from exl2flow.model import DenseLinear, Sublayer
from exl2flow.model.layers.experts import ExpertsSublayer

FAMILIES = (
    "mixtral",
    "qwen2-moe",  # a shared expert with a gate
    "qwen3-moe",
    "granite-moe-shared",  # the highest logits become weights; a multiplier
    "glm4-moe",  # groups, corrections, a shared expert
    "ernie4.5-moe",
    "minimax-m2",
    "gpt-oss",  # biases, clamped swiglu
    "dbrx",  # weights divided by another norm
    "llama4",  # the input is weighed
)


def experts_of(family: str, folder: Path) -> list[ExpertsSublayer]:
    sublayers = sublayers_of(make_packed(family, folder))
    return [s for s in sublayers if isinstance(s, ExpertsSublayer)]


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_all_experts_at_once_are_what_they_are_one_by_one(family: str, tmp_path: Path) -> None:
    for sublayer in experts_of(family, tmp_path):
        hidden = torch.randn(2, 9, sublayer.router.weight.shape[1]).half()
        expected = sublayer.output(hidden, sublayer.reads(hidden))

        found = sublayer(hidden)

        assert sublayer.bank is not None
        assert sublayer.bank.is_known
        added = expected.float() - hidden.float()
        assert (found.float() - expected.float()).norm() <= 3e-3 * added.norm()


def test_only_packed_experts_are_one_bank(tmp_path: Path) -> None:
    [sublayer, *_] = experts_of("mixtral", tmp_path)
    name = next(iter(sublayer.linears))
    dense = DenseLinear(sublayer.linears[name].weight)

    mixed = ExpertsSublayer(
        sublayer.spec,
        norms=sublayer.norms,
        linears=sublayer.linears | {name: dense},
        router=sublayer.router,
        shared_gate=None,
        activation=sublayer.activation,
    )

    assert mixed.bank is None
    hidden = torch.randn(1, 3, sublayer.router.weight.shape[1]).half()
    assert torch.allclose(mixed(hidden), sublayer(hidden), atol=2e-2)


def test_replaced_maps_are_called(tmp_path: Path) -> None:
    [sublayer, *_] = experts_of("mixtral", tmp_path)
    capture = sublayer.spec.projections[0].capture
    calls: list[int] = []

    def doubled(x: torch.Tensor) -> list[torch.Tensor]:
        calls.append(len(x))
        return [2 * y for y in Sublayer.apply_linears(sublayer, capture, x)]

    hidden = torch.randn(1, 6, sublayer.router.weight.shape[1]).half()
    assert not torch.equal(sublayer.replaced({capture: doubled})(hidden), sublayer(hidden))
    assert calls


def test_matrices_in_other_orders_are_not_known(tmp_path: Path) -> None:
    [sublayer, *_] = experts_of("mixtral", tmp_path)
    bank = sublayer.bank
    assert bank is not None
    first, *others = bank.experts
    other = first._replace(up=replace(first.up, order=first.up.order.clone()))

    assert not replace(bank, experts=(other, *others)).is_known
