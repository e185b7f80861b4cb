"""Fisher factors that experts share, and those that each has for itself."""

import json
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import make_tiny

from exl2flow.model import CanonicalTensors, ModelSpec, build_sublayer, resolve
from exl2flow.model.layers.experts import ExpertsSublayer, entering
from exl2flow.quant.sensitivity.backward import sublayer_backward
from exl2flow.quant.sensitivity.expert_factors import (
    LayerSums,
    expert_factors,
    group_bytes,
    layer_file,
    storing_group,
    storing_layer,
    sums_of,
)
from exl2flow.quant.sensitivity.fisher import (
    CAPTURES_KEY,
    Factors,
    FactorSum,
    StoredFactors,
    Sums,
    unpacked,
)
from exl2flow.quant.sensitivity.stage import factor_file

ROWS, TOKENS, HIDDEN, INNER, EXPERTS, BLOCK = 2, 100, 64, 32, 8, 32
ALL = ROWS * TOKENS


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return resolve(make_tiny("qwen2-moe", tmp_path / "model"))


def copied(total: FactorSum) -> FactorSum:
    """Return sums that do not change when the layer's grow."""
    other = copy(total)
    other.input, other.blocks = total.input.clone(), total.blocks.clone()
    return other


def stored(
    spec: ModelSpec, folder: Path, most: int | None, *, never: int | None = None
) -> tuple[dict[str, Factors], Sums]:
    """Write the factors of the first layer's experts; return those of all, and all sums."""
    spec = replace(spec, group_weights=most)
    tensors = CanonicalTensors(spec)
    groups = [s for s in spec.sublayers if s.layer_index == 0 and s.group is not None]
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(ROWS, TOKENS, HIDDEN, generator=generator)
    gradient = torch.randn(ROWS, TOKENS, HIDDEN, generator=generator)
    layer, sums, found = LayerSums(), Sums(), dict[str, Factors]()
    (folder / "factors").mkdir(parents=True)
    entered = []
    for group in groups:
        built = build_sublayer(spec, group, tensors, dtype=torch.float32, device="cpu")
        assert isinstance(built, ExpertsSublayer)
        if never is not None:
            built.router.weight[never] = 0.0
            built.router = replace(built.router, bias=torch.zeros(EXPERTS))
            built.router.bias[never] = -1e4  # type: ignore[index]
        states = entering(states, group, HIDDEN)
        entered.append((built, states))
        states = built(states)
    for built, before in reversed(entered):
        gradient = entering(gradient, built.spec, HIDDEN)
        own = sums_of(built.spec, block=BLOCK, device=torch.device("cpu"))
        sublayer_backward(built, before, gradient, own)
        sums |= {name: copied(total) for name, total in own.items()}
        path = folder / factor_file(built.spec.index)
        storing_group(path, built.spec, own, layer, ALL)()
    storing_layer(folder / layer_file(0), layer, ALL)()
    for group in groups:
        read = StoredFactors.read(folder / factor_file(group.index))
        found |= unpacked(read, "cpu") | expert_factors(read, "cpu")
    return found, sums


def test_factors_are_the_layers_or_the_experts_own(spec: ModelSpec, tmp_path: Path) -> None:
    found, sums = stored(spec, tmp_path, None)

    means = []
    for role in ("gate", "up"):
        members = [sums[f"experts.{e}.{role}_proj"] for e in range(EXPERTS)]
        means.append(sum(m.input for m in members) / sum(m.squares for m in members))
    torch.testing.assert_close(found["experts.0.gate_proj"].input, (means[0] + means[1]) / 2)
    assert {*found} == {*sums}
    for expert in range(EXPERTS):
        for role in ("gate", "up"):
            name = f"experts.{expert}.{role}_proj"
            assert sums[name].count >= 10
            shared, own = found[name].input, found[name].output
            assert own.blocks.shape == (1, INNER, INNER)
            expected = sums[name].blocks / ALL
            ratio = own.trace / float(expected.diagonal(dim1=-2, dim2=-1).sum())
            torch.testing.assert_close(own.blocks, expected * ratio)
            assert torch.equal(shared, found["experts.0.gate_proj"].input)
        down = found[f"experts.{expert}.down_proj"]
        assert down.output.blocks.shape == (HIDDEN // BLOCK, BLOCK, BLOCK)


def test_prices_are_shrunk_where_tokens_are_fewer_than_in_features(
    spec: ModelSpec, tmp_path: Path
) -> None:
    found, sums = stored(spec, tmp_path, None)

    for role, k in (("gate", HIDDEN), ("up", HIDDEN), ("down", INNER)):
        names = [f"experts.{e}.{role}_proj" for e in range(EXPERTS)]
        traces = {name: float(sums[name].squares) / ALL for name in names}
        mean, counts = sum(traces.values()) / EXPERTS, [sums[name].count for name in names]
        assert min(counts) < HIDDEN
        assert max(counts) > INNER
        for name, count in zip(names, counts, strict=True):
            share = count / (count + k) if count < k else 1.0
            expected = share * traces[name] + (1 - share) * mean
            assert found[name].output.trace == pytest.approx(expected, rel=1e-4)


def test_an_expert_without_tokens_has_a_price(spec: ModelSpec, tmp_path: Path) -> None:
    found, sums = stored(spec, tmp_path, None, never=3)

    for role in ("gate", "up", "down"):
        name = f"experts.3.{role}_proj"
        assert sums[name].count == 0
        others = [found[f"experts.{e}.{role}_proj"].output.trace for e in range(EXPERTS)]
        assert found[name].output.trace == pytest.approx(
            sum(float(sums[f"experts.{e}.{role}_proj"].squares) for e in range(EXPERTS))
            / EXPERTS
            / ALL,
            rel=1e-4,
        )
        assert found[name].output.trace < max(others)
        assert float(torch.linalg.eigvalsh(found[name].input).min()) > -1e-6
        assert float(found[name].input.diagonal().mean()) > 0


@pytest.mark.parametrize("most", [3 * HIDDEN * INNER, 3 * 3 * HIDDEN * INNER])
def test_factors_do_not_depend_on_how_a_layer_is_divided(
    most: int, spec: ModelSpec, tmp_path: Path
) -> None:
    whole, _ = stored(spec, tmp_path / "whole", None)

    divided, _ = stored(spec, tmp_path / "divided", most)

    assert {*divided} == {*whole}
    for name, factors in whole.items():
        assert torch.equal(divided[name].input, factors.input)
        assert torch.equal(divided[name].output.blocks, factors.output.blocks)


def test_sizes_of_files_are_forecast(spec: ModelSpec, tmp_path: Path) -> None:
    stored(spec, tmp_path, None)
    sublayer = replace(spec, group_weights=None).sublayers[1]

    size = group_bytes([p for p in sublayer.projections if p.is_routed])

    tensors = load_file(tmp_path / factor_file(1))
    own = sum(t.nbytes for name, t in tensors.items() if not name.startswith("shared"))
    assert size == pytest.approx(own, rel=0.1)  # diagonals


def test_files_that_do_not_name_output_factors_are_read(spec: ModelSpec, tmp_path: Path) -> None:
    found, _ = stored(spec, tmp_path, 1)  # the shared expert has a file of its own
    path = tmp_path / factor_file(9)
    with safe_open(path, "pt") as file:
        captures = json.loads(file.metadata()[CAPTURES_KEY])
    older = {name: entry[:2] for name, entry in captures.items()}
    tensors = {name: t for name, t in load_file(path).items() if name.startswith("shared")}
    save_file(tensors, path, metadata={CAPTURES_KEY: json.dumps(older)})

    again = unpacked(StoredFactors.read(path), "cpu")

    assert {*again} == {"shared.gate_proj", "shared.up_proj", "shared.down_proj"}
    for name, factors in again.items():
        assert torch.equal(factors.output.blocks, found[name].output.blocks)
