"""Errors of groups of experts, and what they say of their layer."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint

from exl2flow.model import CanonicalTensors, ModelSpec, Sublayer, resolve
from exl2flow.model.layers.experts import entering
from exl2flow.quant.quantize.matrix_work import row_errors
from exl2flow.quant.walk.source_model import SourceModel

HIDDEN = 64
GROUP = 3 * 3 * HIDDEN * 96  # weights of three experts, of six


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Granite multiplies what experts add; its shared expert is in a group of its own here."""
    folder: Path = tmp_path_factory.mktemp("granite")
    return replace(resolve(make_checkpoint("granite-moe-shared", folder)), group_weights=GROUP)


def experts_of(spec: ModelSpec) -> list[Sublayer]:
    """Return the sublayers of the first layer's experts."""
    model = SourceModel(spec=spec, tensors=CanonicalTensors(spec), device=torch.device("cpu"))
    found = [s for s in spec.sublayers if s.layer_index == 0 and s.group is not None]
    return [model.sublayer(s) for s in found]


def disturb(sublayers: Iterable[Sublayer]) -> None:
    """Change every weight by about a tenth."""
    for sublayer in sublayers:
        for name in sorted(sublayer.linears):
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            weight = sublayer.linears[name].weight
            noise = torch.randn(weight.shape, generator=generator) * weight.std() / 10
            weight.add_(noise.to(weight))


@torch.inference_mode()
def test_groups_settle_to_what_an_undivided_layer_returns(spec: ModelSpec) -> None:
    (whole,), groups = experts_of(spec.undivided()), experts_of(spec)
    hidden = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(0))
    expected = whole(hidden)

    states, left = hidden, []
    for group in groups:
        states = group(entering(states, group.spec, HIDDEN))
        left.append(float((group.settled(states) - expected).norm()))

    assert len(groups) == 3
    assert whole.settled(expected) is expected
    assert left[0] > left[1] > 0
    assert left[2] == 0  # experts are added in the same order


@torch.inference_mode()
def test_squares_of_the_errors_of_groups_add_up_to_that_of_their_layer(spec: ModelSpec) -> None:
    hidden = torch.randn(1, 64, HIDDEN, generator=torch.Generator().manual_seed(1))

    def error(sublayers: list[Sublayer]) -> float:
        """Return the root of the sum of squares, each group given the changed states before it."""
        states, squares = hidden, 0.0
        for sublayer in sublayers:
            states = entering(states, sublayer.spec, HIDDEN)
            reference = {0: sublayer(states)[0]}
            disturb([sublayer])
            states = sublayer(states)
            squares += float(row_errors(sublayer, [states[0]], reference)) ** 2
        return math.sqrt(squares)

    divided, whole = error(experts_of(spec)), error(experts_of(spec.undivided()))

    # errors of experts are independent, so of their products only the noise is left
    assert divided == pytest.approx(whole, rel=0.1)
