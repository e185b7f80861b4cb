"""The shapes that the demo's trainer knows; the models themselves take minutes."""

import json
import sys
from math import prod
from pathlib import Path

import pytest

from exl2flow.model import expected_tensors, resolve

sys.path.append(str(Path(__file__).parents[3] / "demo"))

from train import HERE, SHAPES, config_of


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
