"""Builders of tiny random checkpoints, written as Hugging Face folders.

Shapes come from our own spec; the parity tests load the same folders with transformers, which
refuses wrong names and shapes.
"""

import json
from functools import cache
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from exl2flow.model import ModelSpec, expected_tensors, resolve

VOCAB_SIZE = 301  # neither a power of two nor a multiple of 32
TOKENIZER_SIZE = 299
SPECIAL_TOKENS = ("<s>", "</s>")  # ids 0 and 1
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
TEXT = (
    "The quick brown fox jumps over the lazy dog.",
    "A tokenizer of a tiny model needs no more than a few sentences.",
    "Numbers such as 3.14 and 42, names such as Ada, and a newline:\n\tdone.",
)

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
FAMILY_CONFIGS: dict[str, dict[str, object]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "qwen2-moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}


def tiny_config(
    family: str,
    *,
    rope: dict[str, object] | None = None,
    dtype: torch.dtype = torch.float32,
    config_form: int = 5,
    **overrides: object,
) -> dict[str, object]:
    """Return the `config.json` of a tiny model.

    Args:
        family: key of `FAMILY_CONFIGS`.
        rope: `rope_type` and its parameters, `rope_theta` included.
        dtype: of the stored tensors.
        config_form: 4 or 5, the major version of transformers whose keys are written.
        **overrides: config keys.
    """
    config = COMMON | FAMILY_CONFIGS[family] | overrides
    rope = {"rope_type": "default", "rope_theta": 10_000.0} | (rope or {})
    if config_form == 5:
        return config | {"rope_parameters": rope, "dtype": DTYPE_NAMES[dtype]}
    theta = rope.pop("rope_theta")
    scaling = None if rope["rope_type"] == "default" else rope
    return config | {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "torch_dtype": DTYPE_NAMES[dtype],
    }


def tiny_spec(family: str, folder: Path, **overrides: object) -> ModelSpec:
    """Write `config.json` of a tiny model to `folder`, and return its spec."""
    (folder / "config.json").write_text(json.dumps(tiny_config(family, **overrides)))
    return resolve(folder)


def random_tensors(spec: ModelSpec, *, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of the source model whose activations keep a size of about 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(spec).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            is_embedding = name.endswith("embed_tokens.weight")
            tensor = noise if is_embedding else noise * shape[1] ** -0.5
        else:
            tensor = 0.1 * noise + (0.0 if name.endswith(".bias") else 1.0)
        tensors[name] = tensor.to(dtype)
    return tensors


def make_tiny(
    family: str,
    folder: Path,
    *,
    rope: dict[str, object] | None = None,
    dtype: torch.dtype = torch.float32,
    config_form: int = 5,
    shards: int = 1,
    seed: int = 0,
    **overrides: object,
) -> Path:
    """Write a tiny random checkpoint with tokenizer into `folder`, made if need be.

    Args:
        family: key of `FAMILY_CONFIGS`.
        folder: where to write.
        rope: `rope_type` and its parameters, `rope_theta` included.
        dtype: of the stored tensors.
        config_form: 4 or 5, the major version of transformers whose keys are written.
        shards: number of safetensors files.
        seed: of the tensors.
        **overrides: config keys.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, rope=rope, dtype=dtype, config_form=config_form, **overrides)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = random_tensors(resolve(folder), dtype=dtype, seed=seed)
    write_shards(folder, tensors, shards=shards)
    (folder / "tokenizer.json").write_text(tiny_tokenizer())
    return folder


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], *, shards: int) -> None:
    """Write `model.safetensors`, or several files with the index that transformers wants."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for index in range(shards):
        name = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[index::shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index_path = folder / "model.safetensors.index.json"
    index_path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@cache
def tiny_tokenizer() -> str:
    """Return the `tokenizer.json` of a byte-level BPE tokenizer of `TOKENIZER_SIZE` entries."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    bos = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer.to_str()
