"""What families differ in is checked before any work, by the names that the files use."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from conversions import small_config
from safetensors.torch import load_file, save_file

from exl2flow.core.errors import PreflightFailed
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.preflight import preflight

Tensors = dict[str, torch.Tensor]
TYPES = ["full_attention", "sliding_attention"]
NUMBER = "must be a number above 0"


def problems_of(source: Path) -> str:
    with pytest.raises(PreflightFailed) as refusal:
        preflight(small_config(source, source.parent / "out"), STAGES)
    return str(refusal.value)


def change_config(source: Path, values: dict[str, Any]) -> None:
    """Change keys; None removes one, and a dot stands for a key of an inner object."""
    path = source / "config.json"
    config = json.loads(path.read_text())
    for key, value in values.items():
        *outer, last = key.split(".")
        place = config[outer[0]] if outer else config
        place.pop(last)
        if value is not None:
            place[last] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("gemma2", {"layer_types": TYPES * 2}, "`layer_types` in *a list of 2 items"),
        ("olmo3", {"layer_types": ["full_attention", "chunked"]}, "holds `chunked`"),
        ("granite4", {"layer_types": ["mamba", "attention"]}, "`layer_types` in *holds `mamba`"),
        (
            "gemma3",
            {"text_config.layer_types": TYPES[:1]},
            "`text_config.layer_types` in *a list of 2 items",
        ),
        ("smollm3", {"no_rope_layers": [1]}, "`no_rope_layers` in *a list of 2 items"),
        ("smollm3", {"no_rope_layers": [1, 7]}, "`no_rope_layers[1]` in *from 0 to 1"),
        ("gemma2", {"query_pre_attn_scalar": 0}, f"`query_pre_attn_scalar` in *{NUMBER}"),
        ("gemma2", {"query_pre_attn_scalar": -8}, f"`query_pre_attn_scalar` in *{NUMBER}"),
        ("gemma2", {"final_logit_softcapping": -1}, f"`final_logit_softcapping` in *{NUMBER}"),
        ("gemma2", {"attn_logit_softcapping": 0}, f"`attn_logit_softcapping` in *{NUMBER}"),
        ("granite", {"embedding_multiplier": math.nan}, f"`embedding_multiplier` in *{NUMBER}"),
        ("granite", {"residual_multiplier": math.inf}, f"`residual_multiplier` in *{NUMBER}"),
        ("granite", {"logits_scaling": 0}, f"`logits_scaling` in *{NUMBER}"),
        ("cohere", {"logit_scale": math.nan}, f"`logit_scale` in *{NUMBER}"),
        ("cohere", {"layer_norm_eps": -1}, f"`layer_norm_eps` in *{NUMBER}"),
        ("minicpm", {"scale_depth": "deep"}, "`scale_depth` in *must be a number"),
        ("index", {"norm_head": "no"}, "`norm_head` in *from 0 to 1"),
        ("gpt2", {"n_head": 5}, "`n_head` in *is 5; it must divide `n_embd`, 64"),
        ("gpt2", {"n_layer": None}, "`n_layer` is missing in"),
        ("gpt2", {"activation_function": "tanh"}, "`activation_function` `tanh` in"),
        ("gpt2", {"scale_attn_weights": False}, "`scale_attn_weights` in *not supported"),
        ("gpt2", {"add_cross_attention": True}, "`add_cross_attention` in *not supported"),
        ("mistral3", {"text_config": None}, "`text_config` is missing in"),
        ("qwen2-vl", {"text_config": None}, "`text_config` is missing in"),
        ("gemma3", {"text_config": [1]}, "`text_config` in *an object"),
        ("gemma3", {"text_config.model_type": None}, "`text_config.model_type` is missing in"),
    ],
)
def test_an_impossible_config_names_key_and_file(
    name: str, values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    source = make_checkpoint(name, tmp_path / "model")
    change_config(source, values)

    problems = problems_of(source)

    assert str(source / "config.json") in problems
    assert all(part in problems for part in words.split("*"))


def test_rows_of_noise_cannot_judge(tmp_path: Path) -> None:
    source = make_checkpoint("qwen2-vl", tmp_path / "model")
    two = {"rows": 2, "row_tokens": 64, "measure_rows": 1, "measure_row_tokens": 64}
    values: dict[str, Any] = {"tune": {"steps": 1}}
    config = small_config(source, tmp_path / "out", calibration=two, **values)

    with pytest.raises(PreflightFailed, match="aside to judge by, but 1 of `--rows`, 2, would be"):
        preflight(config, STAGES)

    preflight(
        small_config(source, tmp_path / "out", calibration=two | {"rows": 4}, **values),
        STAGES,
        anew=True,
    )


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("cohere2", {"intermediate_size": 100}, "`model.layers.0.mlp.down_proj` (100)"),
        ("llama", {"hidden_size": 100}, "`model.layers.0.self_attn.q_proj` (100)"),
        ("glm", {"head_dim": 12}, "`model.layers.0.self_attn.o_proj` (48)"),
        ("gpt2", {"n_inner": 100}, "`model.layers.0.mlp.c_proj` (100)"),
    ],
)
def test_in_features_that_exl2_cannot_store_are_named(
    name: str, values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    source = make_checkpoint(name, tmp_path / "model")
    change_config(source, values)

    problems = problems_of(source)

    assert "in-features must be a multiple of 32" in problems
    assert words in problems


def added(name: str, *shape: int) -> Callable[[Tensors], object]:
    """Return what writes a tensor, be it there already or not."""
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def removed(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def turned(ending: str) -> Callable[[Tensors], object]:
    def turn(tensors: Tensors) -> None:
        names = [name for name in tensors if name.endswith(ending)]
        tensors.update({name: tensors[name].T.contiguous() for name in names})

    return turn


LAYER = "model.layers.0"
FIRST = "transformer.h.0"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "glm",
            added(f"{LAYER}.self_attn.q_norm.weight", 24),
            f"`GlmForCausalLM` does not have: `{LAYER}.self_attn.q_norm.weight`",
        ),
        (
            "gemma",
            added(f"{LAYER}.mlp.up_proj.bias", 96),
            f"`GemmaForCausalLM` does not have: `{LAYER}.mlp.up_proj.bias`",
        ),
        (
            "gemma",
            added(f"{LAYER}.pre_feedforward_layernorm.weight", 64),
            f"does not have: `{LAYER}.pre_feedforward_layernorm.weight`",
        ),
        ("phi3", added("lm_head.bias", 301), "does not have: `lm_head.bias`"),
        (
            "gemma2",
            added(f"{LAYER}.input_layernorm.weight", 63),
            f"`{LAYER}.input_layernorm.weight` has shape (63,), the config implies (64,)",
        ),
        (
            "cohere-qk-norm",
            added(f"{LAYER}.self_attn.q_norm.weight", 16),
            f"`{LAYER}.self_attn.q_norm.weight` has shape (16,), the config implies (4, 16)",
        ),
        (
            "starcoder2",
            removed(f"{LAYER}.input_layernorm.bias"),
            f"`{LAYER}.input_layernorm.bias` (64,) is missing",
        ),
        ("nemotron", removed("model.norm.bias"), "`model.norm.bias` (64,) is missing"),
        (
            "gpt2",
            added("transformer.wpe.weight", 8, 64),
            "(`transformer.wpe.weight`) has shape (8, 64), the config implies (256, 64)",
        ),
        (
            "gpt2",
            turned("mlp.c_fc.weight"),
            f"(`{FIRST}.mlp.c_fc.weight` transposed) has shape (64, 96), the config implies (96, ",
        ),
        (
            "gpt2",
            turned("attn.c_attn.weight"),
            f"`{FIRST}.attn.c_attn.weight` in *has shape (192, 64), the config implies 192 columns",
        ),
        (
            "gpt2",
            added(f"{FIRST}.attn.c_attn.weight", 192),
            f"`{FIRST}.attn.c_attn.weight` in *has shape (192,)",
        ),
        (
            "phi3",
            added(f"{LAYER}.self_attn.qkv_proj.weight", 128),
            f"`{LAYER}.self_attn.qkv_proj.weight` in *has shape (128,)",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_row_are_named(
    name: str, change: Callable[[Tensors], object], words: str, tmp_path: Path
) -> None:
    source = make_checkpoint(name, tmp_path / "model")
    path = source / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)

    problems = problems_of(source)

    assert str(source) in problems
    assert all(part in problems for part in words.split("*"))
