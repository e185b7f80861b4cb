"""Logits against transformers, on tiny random checkpoints in fp32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import near, terms_of
from caches import Sequences
from decoders import build_decoder
from tiny import make_tiny, tiny_spec
from transformers import AutoModelForCausalLM, DynamicCache

from exl2flow.model import Decoder, TensorFiles, resolve

ORIGINAL = 32  # positions before the context was stretched
SHORT, LONG = 24, 80

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-all-keys": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.3,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
    },
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-ungrouped": ("llama", {"num_key_value_heads": 4}),
    "llama-own-head-dim": ("llama", {"head_dim": 24}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 10}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 10,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_bias": True,
        },
    ),
    "qwen3-three-queries-per-key": (
        "qwen3",
        {"num_attention_heads": 6, "head_dim": 32, "tie_word_embeddings": True},
    ),
}


def reference_model(folder: Path) -> Any:
    auto_model: Any = AutoModelForCausalLM
    model, info = auto_model.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def our_model(folder: Path) -> Decoder:
    return build_decoder(resolve(folder), TensorFiles(folder), dtype=torch.float32, device="cpu")


def random_ids(count: int, *, batch: int = 1) -> torch.Tensor:
    return torch.randint(0, 301, (batch, count))


@torch.no_grad()
def assert_same_logits(folder: Path, *, lengths: tuple[int, ...] = (SHORT,)) -> None:
    """Compare whole texts."""
    reference, ours = reference_model(folder), our_model(folder)
    for length in lengths:
        ids = random_ids(length, batch=2)
        expected = reference(ids).logits

        logits = ours.forward(ids)

        bound = near(expected, terms_of(ours.spec, length))
        torch.testing.assert_close(logits, expected, **bound)


@torch.no_grad()
def assert_same_steps(folder: Path, *, prompt: int, steps: int = 8) -> None:
    """Compare a prompt, single tokens and a last chunk, all through each side's cache."""
    reference, ours = reference_model(folder), our_model(folder)
    ids = random_ids(prompt + steps + 5)
    past = DynamicCache(config=reference.config)
    cache = Sequences(ours.spec, tokens=ids.shape[1])
    for chunk in ids.split([prompt, *[1] * steps, 5], dim=1):
        expected = reference(chunk, past_key_values=past, use_cache=True).logits

        logits = cache.read(ours.forward, chunk)

        bound = near(expected, terms_of(ours.spec, ids.shape[1]))
        torch.testing.assert_close(logits, expected, **bound)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_cached_steps_agree_for_every_family(name: str, tmp_path: Path) -> None:
    family, overrides = MODELS[name]

    make_tiny(family, tmp_path, **overrides)

    assert_same_logits(tmp_path, lengths=(SHORT, LONG))
    assert_same_steps(tmp_path, prompt=7)


@pytest.mark.parametrize("name", ROPES)
def test_logits_and_cached_steps_agree_for_every_rope_in_both_config_forms(
    name: str, tmp_path: Path
) -> None:
    make_tiny("llama", tmp_path, rope=ROPES[name])

    assert_same_logits(tmp_path, lengths=(SHORT, LONG))
    assert_same_steps(tmp_path, prompt=ORIGINAL - 4)
    new = resolve(tmp_path)
    assert tiny_spec("llama", tmp_path, rope=ROPES[name], config_form=4) == new


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
def test_logits_agree_for_half_precision_and_sharded_files(
    dtype: torch.dtype, shards: int, tmp_path: Path
) -> None:
    make_tiny("qwen2", tmp_path, dtype=dtype, shards=shards, config_form=4)

    assert_same_logits(tmp_path)


def test_null_and_absent_keys_mean_what_they_mean_to_transformers(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, num_key_value_heads=4)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"head_dim": None, "num_key_value_heads": None, "rope_parameters": None}
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert_same_logits(tmp_path)
