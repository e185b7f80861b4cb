"""What configs of gpt-oss, DBRX and Llama 4 may say, and how refusals name their keys."""

import json
from pathlib import Path
from typing import Any

import pytest
from published import PUBLISHED

from exl2flow.core.errors import SourceModelError, UnsupportedArchitecture
from exl2flow.kernels import Scores
from exl2flow.model import ModelSpec, resolve
from exl2flow.model.config.experts_spec import ExpertsSpec, MlpSpec


def read(name: str, folder: Path, **changes: Any) -> ModelSpec:
    config = json.loads(json.dumps(PUBLISHED[name].config))
    inner = config.get("text_config", config)
    for key, value in changes.items():
        whole = inner.get(key)
        inner[key] = whole | value if isinstance(whole, dict) and isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    return resolve(folder)


def experts(spec: ModelSpec, layer: int = 1) -> ExpertsSpec:
    found = spec.mlps[layer]
    assert isinstance(found, ExpertsSpec)
    return found


@pytest.mark.parametrize(("key", "value"), [("swiglu_limit", 8.0), ("swiglu_alpha", 1.5)])
def test_other_constants_of_the_activation_are_refused(
    key: str, value: float, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedArchitecture, match=f"`{key}` in .* is {value}"):
        read("gpt-oss-20b", tmp_path, **{key: value})


def test_gpt_oss_alternates_windows_and_keeps_yarn_whole(tmp_path: Path) -> None:
    spec = read("gpt-oss-20b", tmp_path)

    assert [a.rule.window for a in spec.attentions[:3]] == [128, None, 128]
    assert not spec.attentions[0].rope.truncate
    assert experts(spec).rule.scores is Scores.TOP_SOFTMAX
    assert experts(spec).expert.activation == "clamped_swiglu"
    assert spec.sublayers[0].sinks == "model.layers.0.self_attn.sinks"


@pytest.mark.parametrize(("power", "norm"), [(1, 1.0), (2, 2.0), (None, None), ("absent", 1.0)])
def test_weights_of_dbrx_are_divided_by_a_norm(
    power: object, norm: float | None, tmp_path: Path
) -> None:
    given = {} if power == "absent" else {"moe_normalize_expert_weights": power}

    assert experts(read("dbrx", tmp_path, ffn_config=given)).rule.norm == norm


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_config": {"kv_n_heads": 5}}, r"`attn_config\.kv_n_heads` in .* is 5"),
        ({"ffn_config": {"moe_top_k": 17}}, r"`ffn_config\.moe_top_k` in .* is 17.*at most"),
        ({"ffn_config": {"moe_num_experts": "x"}}, r"`ffn_config\.moe_num_experts`"),
        ({"ffn_config": {"ffn_act_fn": {"name": "own"}}}, r"`ffn_config\.ffn_act_fn\.name` `own`"),
        ({"ffn_config": {"ffn_act_fn": "silu"}}, r"`ffn_config\.ffn_act_fn`.*an object"),
        ({"attn_config": 5}, "`attn_config`.*an object"),
        ({"d_model": None}, "`d_model` is missing"),
    ],
)
def test_keys_in_objects_are_named_with_these(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceModelError, match=words):
        read("dbrx", tmp_path, **changes)


def test_a_base_that_transformers_added_must_be_the_published_one(tmp_path: Path) -> None:
    same = {"rope_type": "default", "rope_theta": 500_000.0}
    assert read("dbrx", tmp_path, rope_parameters=same).attentions[0].rope.theta == 500_000

    words = r"`attn_config\.rope_theta` in .* is 500000, but `rope_parameters\.rope_theta`.* 10000"
    with pytest.raises(SourceModelError, match=words):
        read("dbrx", tmp_path, rope_parameters=same | {"rope_theta": 10_000.0})


def test_every_fourth_layer_of_llama4_sees_all_and_has_no_positions(tmp_path: Path) -> None:
    layers = read("Llama-4-Scout", tmp_path).attentions

    assert [layer.rule.chunk for layer in layers[:4]] == [8192, 8192, 8192, None]
    assert [layer.rope.rotary_dim for layer in layers[:4]] == [128, 128, 128, 0]
    assert [layer.rope.query_beta for layer in layers[:4]] == [0.0, 0.0, 0.0, 0.1]


@pytest.mark.parametrize(("tuning", "beta"), [(True, 0.1), (4, 0.1), (False, 0.0), (0, 0.0)])
def test_tuning_may_be_a_number(tuning: object, beta: float, tmp_path: Path) -> None:
    spec = read("Llama-4-Scout", tmp_path, attn_temperature_tuning=tuning)

    assert spec.attentions[3].rope.query_beta == beta


def test_layers_of_llama4_are_cut_as_they_are_listed(tmp_path: Path) -> None:
    types = ["full_attention", "chunked_attention"] * 24

    spec = read("Llama-4-Scout", tmp_path, layer_types=types)

    assert [layer.rule.chunk for layer in spec.attentions[:3]] == [None, 8192, None]
    whole = read("Llama-4-Scout", tmp_path, layer_types=None, attention_chunk_size=None)
    assert {layer.rule.chunk for layer in whole.attentions} == {None}


def test_layers_without_experts_have_a_width_of_their_own(tmp_path: Path) -> None:
    spec = read("Llama-4-Maverick", tmp_path)

    dense = spec.mlps[0]
    assert isinstance(dense, MlpSpec)
    assert (dense.intermediate_size, experts(spec).expert.intermediate_size) == (16_384, 8192)
    listed = read("Llama-4-Maverick", tmp_path, moe_layers=[0, 2])
    assert [isinstance(mlp, ExpertsSpec) for mlp in listed.mlps[:4]] == [True, False, True, False]
