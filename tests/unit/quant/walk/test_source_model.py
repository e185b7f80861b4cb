"""The source as quantization sees it: states, noise rows, refusals."""

from pathlib import Path

import pytest
import torch
from conversions import small_config
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, make_tiny

from exl2flow.core.errors import NonFiniteState
from exl2flow.quant.walk.source_model import SourceModel, StatesCheck, device_of


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model", dtype=torch.float16)


def opened(source: Path, **values: object) -> SourceModel:
    config = small_config(source, source.parent / "out", **values)
    return SourceModel.open(config, "cpu")


def spoil(source: Path, name: str, value: float, count: int) -> None:
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[:count] = value
    save_file(tensors, path)


def test_states_are_rows_of_the_embedding_in_fp32(source: Path) -> None:
    ids = torch.randint(VOCAB_SIZE, (3, 8))
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]

    states = opened(source).initial_states(ids)

    assert torch.equal(states, embedding[ids].float())


def test_ids_without_a_row_count_as_zero(source: Path) -> None:
    states = opened(source).initial_states(torch.tensor([[3, VOCAB_SIZE, 10**6, -5]]))

    assert torch.equal(states[0, 1:], states.new_tensor(opened_row(source, 0)).expand(3, -1))


def opened_row(source: Path, index: int) -> list[float]:
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    row: list[float] = embedding[index].tolist()
    return row


def test_noise_rows_have_mean_and_deviation_of_the_others(source: Path) -> None:
    ids = torch.randint(VOCAB_SIZE, (6, 512))
    ids[4:] = -1
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"] *= 0.5
    tensors["model.embed_tokens.weight"] += 3
    save_file(tensors, path)
    model = opened(source)

    states = model.initial_states(ids)

    noise, others = states[4:], states[:4]
    assert torch.equal(others, model.initial_states(ids[:4]))
    count = noise.numel()
    # four deviations of the mean and of the standard deviation of so many normal numbers
    assert abs(float(noise.mean() - others.mean())) < 4 * float(others.std()) / count**0.5
    assert float(noise.std() / others.std()) == pytest.approx(1, abs=4 * (2 * count) ** -0.5)
    assert not torch.equal(noise[0], noise[1])
    assert torch.equal(model.initial_states(ids), states)


def test_sublayers_are_fp32_on_the_device(source: Path) -> None:
    model = opened(source)

    sublayer = model.sublayer(model.spec.sublayers[1])

    assert {linear.weight.dtype for linear in sublayer.linears.values()} == {torch.float32}
    assert device_of(sublayer) == torch.device("cpu")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"]
)
def test_weight_that_is_not_finite_is_named_with_the_count(
    name: str, value: float, source: Path
) -> None:
    spoil(source, name, value, 1)
    model = opened(source)
    index = 3 if "down" in name else 0

    count = "1 of 6,144 elements" if "down" in name else "1 of 4,096 elements"
    with pytest.raises(NonFiniteState, match=rf"`{name}` .* NaN or infinity in {count}; "):
        model.sublayer(model.spec.sublayers[index])


def test_head_that_is_not_finite_is_named(source: Path) -> None:
    spoil(source, "lm_head.weight", float("nan"), 1)

    with pytest.raises(NonFiniteState, match=r"`lm_head\.weight`"):
        opened(source).head()


def test_bias_that_is_not_finite_is_named(tmp_path: Path) -> None:
    source = make_tiny("qwen2", tmp_path / "model")
    spoil(source, "model.layers.0.self_attn.k_proj.bias", float("inf"), 1)
    model = opened(source)

    with pytest.raises(NonFiniteState, match=r"k_proj\.bias"):
        model.sublayer(model.spec.sublayers[0])


def test_states_that_are_not_finite_name_sublayer_row_and_count() -> None:
    states = torch.zeros(10, 10)
    states[0, :5] = torch.nan

    check = StatesCheck("layers.3.mlp")
    check.add([0], torch.full((1, 2, 2), 1e38))
    check.finish({})
    check.add([7], states[None])
    with pytest.raises(
        NonFiniteState, match=r"after `layers\.3\.mlp` .* 5 of 100 elements of row 7"
    ):
        check.finish({7: states})


def test_rope_override_changes_attention_and_nothing_else(source: Path) -> None:
    ids = torch.randint(VOCAB_SIZE, (1, 32))
    plain, scaled = opened(source), opened(source, rope={"scale": 4.0})
    states = plain.initial_states(ids)

    outputs = [
        [model.sublayer(model.spec.sublayers[index])(states) for index in (0, 1)]
        for model in (plain, scaled)
    ]

    assert torch.equal(scaled.initial_states(ids), states)
    assert not torch.allclose(outputs[0][0], outputs[1][0], atol=1e-3)
    assert torch.equal(outputs[0][1], outputs[1][1])
