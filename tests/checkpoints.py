"""Tiny checkpoints that transformers writes itself, one or more for each family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import COMMON, tiny_tokenizer

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}
TOWER = {"hidden_size": 32, "num_heads": 2, "patch_size": 4, "depth": 1}
QWEN_TOWER = TOWER | {"out_hidden_size": 64, "intermediate_size": 48}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "head_dim": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.5 * i for i in range(6)],
}


def _mrope(*sections: int, **others: object) -> dict[str, Any]:
    return {"rope_parameters": ROPE | {"mrope_section": sections} | others}


def _wrapped(kind: str, tower: dict[str, Any], **text: object) -> dict[str, Any]:
    text = COMMON | {"model_type": kind, "rope_parameters": ROPE} | text
    tied = text.pop("tie_word_embeddings")
    return {"text_config": text, "vision_config": tower, "tie_word_embeddings": tied}


# name → (what its classes' names begin with, whether it is a wrapper, values of its config)
CHECKPOINTS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "phi3": ("Phi3", False, {"rope_parameters": ROPE, "sliding_window": 10}),
    "phi3-longrope": (
        "Phi3",
        False,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    "phi3-tied": ("Phi3", False, {"tie_word_embeddings": True}),
    "ministral": (
        "Ministral",
        False,
        {
            "head_dim": 24,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "seed-oss": ("SeedOss", False, {"head_dim": 24}),
    "seed-oss-biases": ("SeedOss", False, {"attention_out_bias": True, "mlp_bias": True}),
    "llava": ("Llava", True, _wrapped("mistral", PIXTRAL, head_dim=24, sliding_window=None)),
    "mistral3": ("Mistral3", True, _wrapped("mistral", PIXTRAL, head_dim=24, sliding_window=10)),
    "qwen2-vl": (
        "Qwen2VL",
        True,
        _wrapped(
            "qwen2_vl_text",
            TOWER | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
            **_mrope(2, 3, 3),
        ),
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        True,
        _wrapped("qwen2_5_vl_text", QWEN_TOWER, **_mrope(2, 3, 3), tie_word_embeddings=True),
    ),
    "qwen3-vl": (
        "Qwen3VL",
        True,
        _wrapped(
            "qwen3_vl_text",
            QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **_mrope(6, 5, 5, mrope_interleaved=True),
            head_dim=32,
        ),
    ),
}
TOWERS = {
    "llava": ("vision_tower.", "multi_modal_projector."),
    "mistral3": ("vision_tower.", "multi_modal_projector."),
    "qwen2-vl": ("visual.",),
    "qwen2.5-vl": ("visual.",),
    "qwen3-vl": ("model.visual.",),
}


def make_checkpoint(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random checkpoint of `CHECKPOINTS` with a tokenizer into `folder`."""
    start, is_wrapper, values = CHECKPOINTS[name]
    suffix = "ForConditionalGeneration" if is_wrapper else "ForCausalLM"
    make_config: Callable[..., Any] = getattr(transformers, f"{start}Config")
    values = values if is_wrapper else COMMON | values
    config = make_config(**values, pad_token_id=None) if not is_wrapper else make_config(**values)
    model = getattr(transformers, f"{start}{suffix}")(config)
    randomize(model)
    model.to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tiny_tokenizer())
    return folder


def randomize(model: torch.nn.Module) -> None:
    """Draw all parameters, norms and biases too, so that activations keep a size of about 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                is_embedding = name.endswith("embed_tokens.weight")
                parameter.copy_(noise if is_embedding else noise * parameter[0].numel() ** -0.5)
            else:
                parameter.copy_(0.1 * noise + (0.0 if name.endswith(".bias") else 1.0))


def rename(folder: Path, change: Callable[[str], str]) -> None:
    """Change the names of a checkpoint's tensors."""
    path = folder / "model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
