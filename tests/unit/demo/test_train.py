"""The shapes that the demo's trainer knows; the models themselves take minutes."""

import json
import sys
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from exl2flow.core.store.files import read_tensors
from exl2flow.model import expected_tensors, resolve

sys.path.append(str(Path(__file__).parents[3] / "demo"))

from train import HERE, QWEN3_MOE, SHAPES, config_of, learning_rate, save


def test_the_shipped_model_has_the_default_shape() -> None:
    shipped = (HERE / "model" / "config.json").read_text(encoding="utf-8")

    assert json.dumps(config_of("demo"), indent=2) + "\n" == shipped


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_small_and_can_be_quantized(shape: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(shape)))

    spec = resolve(tmp_path)

    assert 3_000_000 <= sum(map(prod, expected_tensors(spec).values())) <= 5_000_000
    widths = [p.in_features for sublayer in spec.sublayers for p in sublayer.projections]
    assert [width for width in widths if width % 32] == []


def test_deep_has_other_proportions_than_demo() -> None:
    demo, deep = SHAPES["demo"], SHAPES["deep"]

    assert deep["num_hidden_layers"] > demo["num_hidden_layers"]
    assert deep["hidden_size"] < demo["hidden_size"]
    assert deep["head_dim"] != demo["head_dim"]
    assert deep["intermediate_size"] % 128
    assert deep["num_attention_heads"] // deep["num_key_value_heads"] == 3


@pytest.fixture
def small() -> dict[str, object]:
    """The config of `moe` with one narrow layer."""
    return config_of("moe") | {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 96}


def test_experts_are_written_one_by_one_as_the_family_names_them(
    small: dict[str, object], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small), dtype=torch.float32)

    save(model, Tokenizer.from_file(str(HERE / "model" / "tokenizer.json")), small, tmp_path)

    weights = read_tensors(tmp_path / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    expected = expected_tensors(resolve(tmp_path))
    assert shapes == {name: tuple(shape) for name, shape in expected.items()}
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].half()), name


def test_the_balance_of_experts_is_part_of_the_loss_and_not_of_the_config(
    small: dict[str, object],
) -> None:
    known = AutoConfig.for_model(**small, output_router_logits=True)
    model = AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    ids = torch.arange(64)[None]

    output = model(input_ids=ids, labels=ids)

    assert "output_router_logits" not in small
    coefficient = QWEN3_MOE["router_aux_loss_coef"]
    assert output.aux_loss >= small["num_experts_per_tok"]  # its least, where the load is even
    plain = model(input_ids=ids, labels=ids, output_router_logits=False).loss
    balance = (output.loss - plain).item()
    assert balance == pytest.approx(coefficient * output.aux_loss.item(), rel=1e-3)


@pytest.mark.parametrize("steps", [600, 1500, 5000])
def test_the_rate_has_no_jump_after_its_warm_up(steps: int) -> None:
    rates = [learning_rate(step, steps) for step in range(steps)]

    assert max(rates) == rates[149] == 2.5e-3
    assert max(a - b for a, b in pairwise(rates)) < 1e-5
