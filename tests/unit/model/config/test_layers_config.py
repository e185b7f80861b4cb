"""What configs of all forms say about layers, against transformers' configs and modules."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from exl2flow.core.errors import SourceModelError, UnsupportedArchitecture
from exl2flow.model import resolve
from exl2flow.model.config.spec import AttentionSpec
from exl2flow.model.layers.rope import attention_factor, inverse_frequencies

LAYERS = 9
COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 96,
    "vocab_size": 301,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "head_dim": 16,
}
NAMES = {
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "olmo3": "Olmo3",
    "exaone4": "Exaone4",
    "smollm3": "SmolLM3",
    "glm": "Glm",
    "nemotron": "Nemotron",
    "ernie4_5": "Ernie4_5",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "ministral3": "Ministral3",
    "ministral": "Ministral",
    "granite": "Granite",
    "granitemoehybrid": "GraniteMoeHybrid",
    "llama": "Llama",
    "qwen3": "Qwen3",
    "phi3": "Phi3",
}
TYPES = ["sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def layers_of(kind: str, folder: Path, **values: Any) -> tuple[AttentionSpec, ...]:
    """Return what we read from a config; values of None are null in the file."""
    config = COMMON | {"architectures": [f"{NAMES[kind]}ForCausalLM"]} | values
    (folder / "config.json").write_text(json.dumps(config))
    return resolve(folder).attentions


def modules_of(kind: str, part: str, **values: Any) -> list[Any]:
    """Return transformers' attention of each layer, or its one rotary embedding."""
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    name = "gemma3_text" if kind == "gemma3" else kind
    config = AutoConfig.for_model(name, **json.loads(json.dumps(COMMON | values)))
    make = getattr(modeling, f"{NAMES[kind]}{part}")
    return [make(config, i) for i in range(LAYERS)] if part == "Attention" else [make(config)]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("gemma2", {}),
        ("gemma2", {"sliding_window": 32, "layer_types": TYPES[::-1] * 4 + TYPES[:1]}),
        ("gemma3", {}),
        ("gemma3", {"sliding_window": 32, "sliding_window_pattern": 2}),
        ("cohere2", {}),
        ("cohere2", {"sliding_window": 32, "sliding_window_pattern": 3}),
        ("cohere2", {"sliding_window": None}),
        ("olmo3", {}),
        ("exaone4", {}),
        ("exaone4", {"sliding_window": 32, "sliding_window_pattern": 5}),
        ("exaone4", {"sliding_window": None, "layer_types": TYPES[1:] * LAYERS}),
        ("smollm3", {}),
        ("smollm3", {"no_rope_layer_interval": 2}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 32}),
        ("smollm3", {"sliding_window": 32, "no_rope_layers": [0, 1, 1] * 3}),
        (
            "smollm3",
            {
                "use_sliding_window": True,
                "sliding_window": 32,
                "layer_types": TYPES * 4 + TYPES[:1],
            },
        ),
        ("ministral", {}),
        ("ministral", {"layer_types": TYPES * 4 + TYPES[:1]}),
    ],
)
def test_windows_and_layers_without_positions_are_those_of_transformers(
    kind: str, values: dict[str, Any], tmp_path: Path
) -> None:
    theirs = modules_of(kind, "Attention", **values)

    layers = layers_of(kind, tmp_path, **values)

    assert [x.rule.window for x in layers] == [window_of(x) for x in theirs]
    assert [x.rope.rotary_dim > 0 for x in layers] == [rotates(x) for x in theirs]
    assert [x.rule.scale for x in layers] == [pytest.approx(x.scaling) for x in theirs]


def window_of(module: Any) -> int | None:
    return module.sliding_window if getattr(module, "is_sliding", True) else None


def rotates(module: Any) -> bool:
    match type(module).__name__:
        case "Cohere2Attention":
            return module.sliding_window is not None
        case "Exaone4Attention":
            return module.sliding_window is None or module.is_sliding
        case "SmolLM3Attention":
            return bool(module.use_rope)
        case _:
            return True


def test_a_pattern_of_letters_repeats_and_ends_with_a_full_layer(tmp_path: Path) -> None:
    values = {"sliding_window": 32, "sliding_window_pattern": "LLLG", "layer_types": None}

    layers = layers_of("exaone4", tmp_path, **values)

    assert [x.rule.window for x in layers] == [32, 32, 32, None, 32, 32, 32, None, None]


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("gemma3", {}),
        ("gemma3", {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "full_attention": LINEAR | {"rope_theta": 5e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                }
            },
        ),
        ("gemma3", {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": None}}),
        ("olmo3", {}),
        ("olmo3", {"rope_theta": 5e5, "rope_scaling": YARN}),
        (
            "olmo3",
            {
                "rope_parameters": {
                    "full_attention": YARN | {"rope_theta": 3e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 3e5},
                }
            },
        ),
        ("glm", {}),
        ("glm", {"partial_rotary_factor": 0.75}),
        ("glm", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}),
        ("nemotron", {}),
        ("cohere", {}),
        ("cohere2", {}),
        ("exaone4", {}),
        ("smollm3", {}),
        ("ernie4_5", {}),
        ("hunyuan_v1_dense", {}),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}),
        ("ministral3", {}),
        ("llama", {"rope_scaling": {}, "rope_parameters": YARN}),
        ("llama", {"partial_rotary_factor": 1.0}),
        ("phi3", {"pad_token_id": 0, "partial_rotary_factor": 0.75}),
    ],
)
def test_ropes_are_those_of_transformers(kind: str, values: dict[str, Any], tmp_path: Path) -> None:
    [theirs] = modules_of(kind, "RotaryEmbedding", **values)

    layers = [x for x in layers_of(kind, tmp_path, **values) if x.rope.rotary_dim]

    for layer in layers:
        start = ""
        if hasattr(theirs, "full_attention_inv_freq"):
            start = "full_attention_" if layer.rule.window is None else "sliding_attention_"
        frequencies = inverse_frequencies(layer.rope, 200)
        torch.testing.assert_close(frequencies, getattr(theirs, f"{start}inv_freq"))
        scaling = getattr(theirs, f"{start}attention_scaling")
        assert attention_factor(layer.rope) == pytest.approx(scaling)


@pytest.mark.parametrize(
    ("kind", "interleaved", "after"),
    [
        ("cohere", True, False),
        ("cohere2", True, False),
        ("glm", True, False),
        ("ernie4_5", True, False),
        ("gemma3", False, False),
        ("hunyuan_v1_dense", False, True),
    ],
)
def test_families_say_how_pairs_lie_and_when_heads_are_normalized(
    kind: str, interleaved: bool, after: bool, tmp_path: Path
) -> None:
    layers = layers_of(kind, tmp_path)

    assert {x.rope.interleaved for x in layers if x.rope.rotary_dim} == {interleaved}
    assert {x.norm_after_rope for x in layers} == {after}


@pytest.mark.parametrize(
    ("kind", "values", "scale", "softcap"),
    [
        ("llama", {}, 0.25, None),
        ("gemma2", {}, 1 / 16, 50.0),
        ("gemma2", {"query_pre_attn_scalar": 144, "attn_logit_softcapping": 9.5}, 1 / 12, 9.5),
        ("gemma2", {"attn_logit_softcapping": None}, 1 / 16, None),
        ("gemma3", {"query_pre_attn_scalar": 64}, 1 / 8, None),
        ("granite", {}, 1.0, None),
        ("granite", {"attention_multiplier": 0.0078125}, 0.0078125, None),
    ],
)
def test_scores_are_scaled_and_capped_as_the_family_says(
    kind: str, values: dict[str, Any], scale: float, softcap: float | None, tmp_path: Path
) -> None:
    rules = {layer.rule for layer in layers_of(kind, tmp_path, sliding_window=None, **values)}

    assert [(rule.scale, rule.softcap) for rule in rules] == [(scale, softcap)]


@pytest.mark.parametrize(
    ("values", "rotates"),
    [
        ({"position_embedding_type": "rope"}, True),
        ({"position_embedding_type": "nope"}, False),
        ({"position_embedding_type": None}, False),
        ({}, False),
    ],
)
def test_positions_may_be_a_choice_of_the_whole_model(
    values: dict[str, Any], rotates: bool, tmp_path: Path
) -> None:
    values = values | {"shared_intermediate_size": 96, "layer_types": ["attention"] * LAYERS}

    layers = layers_of("granitemoehybrid", tmp_path, **values)

    assert {layer.rope.rotary_dim > 0 for layer in layers} == {rotates}


def test_queries_grow_with_positions_where_the_rope_says_so(tmp_path: Path) -> None:
    scaled = {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}

    [rope] = {layer.rope for layer in layers_of("ministral3", tmp_path, **scaled)}

    assert (rope.query_beta, rope.original_max_positions) == (0.1, 64)


def test_the_reach_is_that_of_the_layers_that_rotate(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0}

    layers_of("smollm3", tmp_path, rope_parameters=dynamic)

    assert resolve(tmp_path).max_positions == 512


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("cohere2", {"layer_types": TYPES}, r"`layer_types`.*a list of 9 items"),
        ("cohere2", {"sliding_window_pattern": 0}, "`sliding_window_pattern`.*from 1 to"),
        ("exaone4", {"sliding_window_pattern": "LLX"}, "`sliding_window_pattern`.*`G`, `L`"),
        ("exaone4", {"sliding_window_pattern": ""}, "`sliding_window_pattern`"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "`no_rope_layers`.*a list of 9 items"),
        ("smollm3", {"no_rope_layers": [2] * 9}, r"`no_rope_layers\[0\]`.*from 0 to 1"),
        ("smollm3", {"no_rope_layer_interval": 0}, "`no_rope_layer_interval`"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "`query_pre_attn_scalar`.*above 0"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "`attn_logit_softcapping`.*above 0"),
        ("gemma3", {"rope_local_base_freq": 0.5}, "`rope_local_base_freq`.*above 1"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
            r"`rope_parameters\.full_attention\.factor` is missing",
        ),
        ("glm", {"partial_rotary_factor": 0.0}, "`partial_rotary_factor`.*above 0"),
        ("glm", {"partial_rotary_factor": 0.05}, "rotate 0 of 16"),
        (
            "smollm3",
            {
                "use_sliding_window": False,
                "sliding_window": 8,
                "layer_types": TYPES * 4 + TYPES[:1],
            },
            "`layer_types`.*`sliding_attention`, but `use_sliding_window` is not true",
        ),
        (
            "ministral3",
            {"rope_parameters": YARN | {"llama_4_scaling_beta": -1}},
            r"`rope_parameters\.llama_4_scaling_beta`.*above 0",
        ),
    ],
)
def test_impossible_values_are_named(
    kind: str, values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceModelError, match=rf"{words}"):
        layers_of(kind, tmp_path, **values)


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("granitemoehybrid", {"layer_types": ["mamba"] * 9}, "holds `mamba`"),
        (
            "granitemoehybrid",
            {"position_embedding_type": "learned"},
            "`position_embedding_type`.*`learned`; supported are `rope`, `nope`",
        ),
        (
            "llama",
            {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
            r"`rope_parameters\.llama_4_scaling_beta`.*something else",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 2.0}},
            r"`rope_scaling\.alpha`.*something else",
        ),
        (
            "qwen3",
            {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
            r"`rope_parameters\.partial_rotary_factor`.*something else",
        ),
        ("ernie4_5", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor`.*something else"),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "`rope_parameters`.*differs between layers",
        ),
    ],
)
def test_config_keys_that_change_the_graph_are_refused(
    kind: str, values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    values = {"shared_intermediate_size": 96} | values

    with pytest.raises(UnsupportedArchitecture, match=words):
        layers_of(kind, tmp_path, **values)
