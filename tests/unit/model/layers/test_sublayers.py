from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_tiny

from exl2flow.core.errors import MissingTensor
from exl2flow.model import DenseLinear, ModelSpec, Sublayer, TensorFiles, build_sublayer, resolve
from exl2flow.model.layers.attention import AttentionSublayer, Projected
from exl2flow.model.layers.mlp import MlpSublayer, activated


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return resolve(make_tiny("qwen3", tmp_path, attention_bias=True))


@pytest.fixture
def build(spec: ModelSpec) -> Callable[[int], Sublayer]:
    files = TensorFiles(spec.source_dir)
    return lambda index: build_sublayer(
        spec, spec.sublayers[index], files, dtype=torch.float32, device="cpu"
    )


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(2, 9, 64)


@pytest.mark.parametrize("index", [0, 1])
def test_two_phases_compose_to_the_call(
    index: int, build: Callable[[int], Sublayer], hidden: torch.Tensor
) -> None:
    sublayer = build(index)

    result = sublayer.output(hidden, sublayer.reads(hidden))

    torch.testing.assert_close(result, sublayer(hidden), rtol=0, atol=0)


@pytest.mark.parametrize("index", [0, 1])
def test_captures_have_the_in_features_of_their_projections(
    index: int, build: Callable[[int], Sublayer], hidden: torch.Tensor
) -> None:
    sublayer = build(index)

    widths = {capture: x.shape[-1] for capture, x in sublayer.reads(hidden).items()}

    assert list(widths) == ["input", "inner"]
    for projection in sublayer.spec.projections:
        assert widths[projection.capture] == projection.in_features


@pytest.mark.parametrize(("index", "last"), [(0, "o_proj"), (1, "down_proj")])
def test_replacing_the_last_linear_leaves_what_it_reads(
    index: int, last: str, build: Callable[[int], Sublayer], hidden: torch.Tensor
) -> None:
    sublayer = build(index)
    inner = sublayer.reads(hidden)["inner"]

    sublayer.linears[last] = DenseLinear(torch.zeros_like(sublayer.linears[last].weight))

    torch.testing.assert_close(sublayer.reads(hidden)["inner"], inner, rtol=0, atol=0)
    torch.testing.assert_close(sublayer(hidden), hidden, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("index", "name"),
    [(0, "q_proj"), (0, "k_proj"), (0, "v_proj"), (1, "gate_proj"), (1, "up_proj")],
)
def test_replacing_a_first_linear_changes_what_the_last_one_reads(
    index: int, name: str, build: Callable[[int], Sublayer], hidden: torch.Tensor
) -> None:
    sublayer = build(index)
    inner = sublayer.reads(hidden)["inner"]

    sublayer.linears[name] = DenseLinear(torch.randn_like(sublayer.linears[name].weight))

    assert not torch.allclose(sublayer.reads(hidden)["inner"], inner, atol=1e-3)


def test_attention_can_be_recomputed_from_kept_projections(
    build: Callable[[int], Sublayer], hidden: torch.Tensor
) -> None:
    sublayer = build(0)
    assert isinstance(sublayer, AttentionSublayer)
    reads = sublayer.reads(hidden, start=3)
    kept = sublayer.project(reads["input"])

    again = sublayer.attend(Projected(q=kept.q, k=kept.k, v=kept.v), start=3)

    torch.testing.assert_close(again, reads["inner"], rtol=0, atol=0)


def test_gated_product_can_be_recomputed_from_kept_outputs(
    build: Callable[[int], Sublayer], hidden: torch.Tensor
) -> None:
    sublayer = build(1)
    assert isinstance(sublayer, MlpSublayer)
    x = sublayer.norms["before"](hidden)
    gate, up = sublayer.linears["gate_proj"](x), sublayer.linears["up_proj"](x)

    product = activated([gate, up], sublayer.activation)

    torch.testing.assert_close(product, torch.nn.functional.silu(gate) * up)


def test_position_does_not_change_attention_of_a_whole_row(
    build: Callable[[int], Sublayer], hidden: torch.Tensor
) -> None:
    sublayer = build(0)

    torch.testing.assert_close(sublayer(hidden, start=50), sublayer(hidden), rtol=0, atol=1e-5)


def test_missing_norm_of_heads_is_named(spec: ModelSpec) -> None:
    path = spec.source_dir / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.self_attn.k_norm.weight"]
    save_file(tensors, path)
    files = TensorFiles(spec.source_dir)

    with pytest.raises(MissingTensor, match="k_norm"):
        build_sublayer(spec, spec.sublayers[0], files, dtype=torch.float32, device="cpu")
