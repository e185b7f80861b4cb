import json
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from exl2flow.core.errors import ConfigError, SourceModelError, UnsupportedArchitecture
from exl2flow.model import expected_tensors, resolve
from exl2flow.model.config.rope_spec import RopeKind

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def write_config(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(tiny_config(family, **overrides)))
    return folder


def without(folder: Path, key: str) -> Path:
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_sublayers_alternate_in_walk_order_and_projections_state_what_they_read(
    tmp_path: Path,
) -> None:
    spec = resolve(write_config(tmp_path, head_dim=32))

    assert [(sublayer.index, sublayer.name) for sublayer in spec.sublayers] == [
        (0, "model.layers.0.self_attn"),
        (1, "model.layers.0.mlp"),
        (2, "model.layers.1.self_attn"),
        (3, "model.layers.1.mlp"),
    ]
    attention, mlp = spec.sublayers[:2]
    captures = {p.name: p.capture for p in (*attention.projections, *mlp.projections)}
    assert captures == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "input"),
        **dict.fromkeys(("o_proj", "down_proj"), "inner"),
    }
    q, k, _, o = attention.projections
    assert (q.key, q.in_features, q.out_features) == ("model.layers.0.self_attn.q_proj", 64, 128)
    assert (k.in_features, k.out_features) == (64, 64)
    assert (o.in_features, o.out_features) == (128, 64)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"head_dim": 8}),
        ("qwen2", {}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
    ],
)
def test_expected_tensors_are_those_of_transformers(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    make_tiny(family, tmp_path, **overrides)

    auto_model: Any = AutoModelForCausalLM
    model = auto_model.from_config(AutoConfig.from_pretrained(tmp_path))

    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if "tie_word_embeddings" in overrides:
        del shapes["lm_head.weight"]
    assert expected_tensors(resolve(tmp_path)) == shapes


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_both_config_forms_resolve_to_the_same_spec(family: str, tmp_path: Path) -> None:
    old = resolve(write_config(tmp_path, family, rope=YARN, config_form=4))
    new = resolve(write_config(tmp_path, family, rope=YARN, config_form=5))

    assert old == new
    assert old.attentions[0].rope.kind is RopeKind.YARN


def test_old_names_of_the_rope_keys_are_read(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    scaling = {"type": "su", **factors}
    write_config(tmp_path, rope_scaling=scaling, original_max_position_embeddings=64)

    rope = resolve(tmp_path).attentions[0].rope

    assert rope.kind is RopeKind.LONGROPE
    assert rope.original_max_positions == 64
    assert rope.factor == 256 / 64


def test_rope_overrides_change_only_the_rope(tmp_path: Path) -> None:
    spec = resolve(write_config(tmp_path))

    changed = spec.with_rope(scale=2.0, alpha=3.0)

    assert changed.attentions[0].rope.position_scale == 2.0
    assert changed.attentions[0].rope.theta == pytest.approx(10_000 * 3.0 ** (16 / 14))
    assert spec.with_rope() == spec


@pytest.mark.parametrize("factor", [0.0, -1.0, 5e-324, 1e300, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["scale", "alpha", "yarn"])
def test_rope_overrides_that_leave_no_positions_are_refused(
    tmp_path: Path, name: str, factor: float
) -> None:
    spec = resolve(write_config(tmp_path))

    with pytest.raises(ConfigError, match=f"`{name}` of the rotary embedding is "):
        spec.with_rope(**{name: factor})


@pytest.mark.parametrize(
    ("family", "overrides", "windows"),
    [
        ("llama", {"sliding_window": 8}, (None, None)),
        ("mistral", {"sliding_window": 8}, (8, 8)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("qwen2", {"sliding_window": 8, "max_window_layers": 0}, (None, None)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            (None, 8),
        ),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, (None, None)),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
    ],
)
def test_windows_follow_the_family_rule(
    family: str, overrides: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    spec = resolve(write_config(tmp_path, family, **overrides))

    assert tuple(layer.rule.window for layer in spec.attentions) == windows


def test_what_a_config_lacks_is_the_default_of_its_family(tmp_path: Path) -> None:
    write_config(tmp_path, "mistral")
    spec = resolve(without(tmp_path, "sliding_window"))
    assert [layer.rule.window for layer in spec.attentions] == [4096, 4096]

    write_config(tmp_path, "qwen3")
    assert resolve(without(tmp_path, "head_dim")).attentions[0].head_dim == 128


@pytest.mark.parametrize(
    ("eos", "expected"), [(2, (2,)), ([2, 5], (2, 5)), (None, ()), (-1, ()), ([], ())]
)
def test_token_ids_may_be_one_several_or_none(
    eos: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    spec = resolve(write_config(tmp_path, eos_token_id=eos))

    assert spec.eos_token_ids == expected


def test_quant_method_is_read_from_the_config(tmp_path: Path) -> None:
    plain = resolve(write_config(tmp_path))
    quantized = resolve(write_config(tmp_path, quantization_config={"quant_method": "exl2"}))

    assert plain.quant_method is None
    assert quantized.quant_method == "exl2"


@pytest.mark.parametrize(
    "architecture", ["GPTNeoXForCausalLM", "MambaForCausalLM", "PhimoeForCausalLM", "Own"]
)
def test_names_that_are_not_near_are_not_called_so(architecture: str, tmp_path: Path) -> None:
    write_config(tmp_path, architectures=[architecture])

    with pytest.raises(
        UnsupportedArchitecture, match=f"`{architecture}`.*is not supported"
    ) as caught:
        resolve(tmp_path)
    assert "nearest" not in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "nearest"),
    [
        ("Qwen3xForCausalLM", "`Qwen3ForCausalLM`"),
        ("LLaMAForCausalLM", "`LlamaForCausalLM`"),
        ("LlamaForCausalLN", "`LlamaForCausalLM`"),
    ],
)
def test_unknown_architecture_names_the_nearest(
    architecture: str, nearest: str, tmp_path: Path
) -> None:
    write_config(tmp_path, architectures=[architecture])

    with pytest.raises(UnsupportedArchitecture, match=f"`{architecture}`.*nearest are.*{nearest}"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rope": {"rope_type": "proportional", "factor": 2.0}}, "`proportional`.*`longrope`"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs between layers"),
        ({"hidden_act": "quick_gelu"}, "`hidden_act` `quick_gelu`.*`silu`"),
    ],
)
def test_error_for_an_unknown_variant_lists_the_supported_ones(
    overrides: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = tiny_config("llama", rope=overrides.pop("rope", None)) | overrides
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(UnsupportedArchitecture, match=words):
        resolve(tmp_path)


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_missing_key_is_named_with_its_file(key: str, tmp_path: Path) -> None:
    write_config(tmp_path)

    with pytest.raises(SourceModelError, match=rf"`{key}` is missing in `.*config\.json`"):
        resolve(without(tmp_path, key))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hidden_size": "64"}, "`hidden_size`.*is '64'; it must be an integer"),
        ({"hidden_size": 0}, "from 1 to"),
        ({"hidden_size": 10**12}, "`hidden_size`.*from 1 to 1048576"),
        ({"num_hidden_layers": 2_000_000_000}, "`num_hidden_layers`.*from 1 to 2048"),
        ({"num_attention_heads": 10**400}, "`num_attention_heads`.*from 1 to"),
        ({"vocab_size": 1e300}, "`vocab_size`.*from 1 to"),
        ({"max_position_embeddings": 2**40}, "`max_position_embeddings`.*from 1 to"),
        ({"eos_token_id": 2**64}, "`eos_token_id`"),
        ({"rms_norm_eps": 10**400}, "`rms_norm_eps`.*at most"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps`.*a number"),
        ({"hidden_act": "\ud800"}, "cannot be used as JSON.*surrogates"),
        ({"vocab_size": True}, "`vocab_size`"),
        ({"rms_norm_eps": -1e-5}, "`rms_norm_eps`.*above 0"),
        ({"rms_norm_eps": "tiny"}, "`rms_norm_eps`.*a number"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"hidden_act": 3}, "`hidden_act`.*a string"),
        ({"num_key_value_heads": 3}, "must divide"),
        ({"hidden_size": 66}, "`num_attention_heads`.*must divide `hidden_size`, 66"),
        ({"head_dim": 15}, "rotate 15 of 15"),
        ({"partial_rotary_factor": 1.5}, "rotate 24 of 16"),
        ({"architectures": []}, "a list of 1 items"),
        ({"architectures": [3]}, "a list of strings"),
        ({"eos_token_id": "</s>"}, "`eos_token_id`"),
        ({"rope_scaling": "yarn"}, "`rope_scaling`.*an object"),
    ],
)
def test_impossible_value_is_named(overrides: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_config(tmp_path, **overrides)

    with pytest.raises(SourceModelError, match=words):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "linear"}, r"`rope_parameters\.factor` is missing"),
        ({"rope_type": "linear", "factor": 0}, "above 0"),
        ({"rope_theta": 1.0}, "above 1"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1},
            "must not exceed",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7},
            "a list of 8 items",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7 + ["x"]},
            r"`rope_parameters\.long_factor\[7\]`",
        ),
    ],
)
def test_impossible_rope_is_named(rope: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_config(tmp_path, rope=rope)

    with pytest.raises(SourceModelError, match=words):
        resolve(tmp_path)


def test_dynamic_ntk_stretches_the_positions_of_the_config(tmp_path: Path) -> None:
    write_config(tmp_path, rope={"rope_type": "dynamic", "factor": 2.5})

    spec = resolve(tmp_path)

    assert (spec.attentions[0].rope.kind, spec.attentions[0].rope.original_max_positions) == (
        "dynamic",
        256,
    )
    assert spec.max_positions == 640


LFS = b"version https://git-lfs.github.com/spec/v1\n"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        *(
            ("config.json", content, r"config\.json")
            for content in (b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000)
        ),
        ("config.json", LFS, r"config\.json` is a Git LFS pointer.*git lfs pull"),
        ("model.Q4_K_M.gguf", b"", "GGUF is quantized already; give the model"),
        ("other.json", b"", r"config\.json` does not exist"),
    ],
)
def test_a_folder_without_a_whole_config_is_named(
    file: str, content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_bytes(content)

    with pytest.raises(SourceModelError, match=words):
        resolve(tmp_path)


@pytest.mark.parametrize("is_file", [False, True])
def test_missing_folder_is_named_and_the_kind_that_is_wanted(is_file: bool, tmp_path: Path) -> None:
    if is_file:
        (tmp_path / "nope").touch()

    with pytest.raises(SourceModelError, match=r"nope` is not a folder; .* of an EXL2 model$"):
        resolve(tmp_path / "nope", wanted="an EXL2 model")
