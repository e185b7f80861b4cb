"""Tiny checkpoints that transformers writes itself, one or more for each family."""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoint_values import (
    CLIP,
    COHERE,
    EXAONE_TOWER,
    GEMMA2,
    GEMMA3,
    GPT2,
    GRANITE,
    GRANITE4,
    LONGROPE,
    MINISTRAL3,
    MIXED,
    PARTIAL,
    PIXTRAL,
    QWEN_TOWER,
    ROPE,
    SIGLIP,
    TOWER,
    YARN,
    mrope,
    wrapped,
)
from expert_checkpoints import WITH_EXPERTS
from mapped import MAPPED
from packed_configs import PACKED
from safetensors.torch import load_file, save_file
from state_checkpoints import WITH_STATE
from tiny import COMMON, tiny_tokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# name → (what its classes' names begin with, whether it is a wrapper, values of its config)
ALL: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "llama": ("Llama", False, {"rope_parameters": ROPE}),
    "mistral": ("Mistral", False, {"head_dim": 24, "sliding_window": 10}),
    "qwen2": ("Qwen2", False, {"rope_parameters": ROPE, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", False, {"head_dim": 24, "use_sliding_window": True} | MIXED),
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
    "llava-llama": ("Llava", True, wrapped("llama", CLIP)),
    "llava": ("Llava", True, wrapped("mistral", PIXTRAL, head_dim=24, sliding_window=None)),
    "mistral3": ("Mistral3", True, wrapped("mistral", PIXTRAL, head_dim=24, sliding_window=10)),
    "qwen2-vl": (
        "Qwen2VL",
        True,
        wrapped(
            "qwen2_vl_text",
            TOWER | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
            **mrope(2, 3, 3),
        ),
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        True,
        wrapped("qwen2_5_vl_text", QWEN_TOWER, **mrope(2, 3, 3), tie_word_embeddings=True),
    ),
    "qwen3-vl": (
        "Qwen3VL",
        True,
        wrapped(
            "qwen3_vl_text",
            QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **mrope(6, 5, 5, mrope_interleaved=True),
            head_dim=32,
        ),
    ),
    "gemma": (
        "Gemma",
        False,
        {"head_dim": 24, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
        | {"rope_parameters": ROPE},
    ),
    "gemma2": (
        "Gemma2",
        False,
        GEMMA2
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
        | {"rope_parameters": ROPE},
    ),
    "gemma3-text": ("Gemma3Text", False, GEMMA3),
    "gemma3": ("Gemma3", True, wrapped("gemma3_text", SIGLIP, **GEMMA3, mm_tokens_per_image=4)),
    "glm": ("Glm", False, {"head_dim": 24} | PARTIAL),
    "glm4": ("Glm4", False, {"head_dim": 24} | PARTIAL),
    "cohere": ("Cohere", False, COHERE),
    "cohere-qk-norm": ("Cohere", False, COHERE | {"use_qk_norm": True}),
    "cohere2": ("Cohere2", False, COHERE | MIXED),
    "granite": ("Granite", False, GRANITE),
    "granite-swa": ("GraniteSWA", False, GRANITE | MIXED | {"layer_rope_theta": [5000.0, 0]}),
    "granite-swa-thetas": (
        "GraniteSWA",
        False,
        GRANITE
        | {"sliding_window": 10, "layer_types": ["full_attention", "sliding_attention"]}
        | {
            "layer_rope_theta": [300, 90_000.0],
            "tie_word_embeddings": False,
            "num_hidden_layers": 2,
        },
    ),
    "granite4": ("GraniteMoeHybrid", False, GRANITE4 | {"position_embedding_type": "rope"}),
    "granite4-no-rope": ("GraniteMoeHybrid", False, GRANITE4 | {"position_embedding_type": "nope"}),
    "olmo2": ("Olmo2", False, {"rope_parameters": ROPE}),
    "olmo3": (
        "Olmo3",
        False,
        MIXED | {"rope_parameters": {"sliding_attention": ROPE, "full_attention": YARN}},
    ),
    "smollm3": ("SmolLM3", False, {"no_rope_layers": [1, 0], "tie_word_embeddings": True}),
    "smollm3-window": (
        "SmolLM3",
        False,
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 10},
    ),
    "exaone4": ("Exaone4", False, {"rope_parameters": ROPE, "head_dim": 24} | MIXED),
    "exaone4-no-window": (
        "Exaone4",
        False,
        {"rope_parameters": ROPE, "head_dim": 24, "tie_word_embeddings": True}
        | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "exaone4.5": (
        "Exaone4_5_",
        True,
        wrapped("exaone4", EXAONE_TOWER, head_dim=24, tie_word_embeddings=False, **MIXED),
    ),
    "ernie4.5": ("Ernie4_5", False, {"head_dim": 24, "tie_word_embeddings": True}),
    "ernie4.5-biases": ("Ernie4_5", False, {"head_dim": 24, "use_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        False,
        {"head_dim": 24, "rope_parameters": ROPE, "tie_word_embeddings": True},
    ),
    "hunyuan-alpha": (
        "HunYuanDenseV1",
        False,
        {
            "head_dim": 24,
            "rope_parameters": ROPE | {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
    ),
    "nemotron": (
        "Nemotron",
        False,
        {"head_dim": 24, "norm_eps": 0.01, "hidden_act": "relu2"} | PARTIAL,
    ),
    "arcee": ("Arcee", False, {"head_dim": 24, "hidden_act": "relu2", "rope_parameters": YARN}),
    "starcoder2": (
        "Starcoder2",
        False,
        {"norm_epsilon": 0.01, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 10}
        | {"rope_parameters": ROPE, "tie_word_embeddings": True},
    ),
    "ministral3": ("Ministral3", False, MINISTRAL3),
    "mistral3-ministral3": ("Mistral3", True, wrapped("ministral3", PIXTRAL, **MINISTRAL3)),
    "gpt2": ("GPT2", False, GPT2),
    "gpt-bigcode": ("GPTBigCode", False, GPT2),
    **WITH_EXPERTS,
    **WITH_STATE,
    **PACKED,
}
CHECKPOINTS = [*ALL, *MAPPED]
TOWERS = {
    "llava-llama": ("vision_tower.", "multi_modal_projector."),
    "llava": ("vision_tower.", "multi_modal_projector."),
    "mistral3": ("vision_tower.", "multi_modal_projector."),
    "mistral3-ministral3": ("vision_tower.", "multi_modal_projector."),
    "gemma3": ("vision_tower.", "multi_modal_projector."),
    "qwen2-vl": ("visual.",),
    "qwen2.5-vl": ("visual.",),
    "qwen3-vl": ("model.visual.",),
    "exaone4.5": ("model.visual.",),
    "qwen3-vl-moe": ("model.visual.",),
    "qwen3.5": ("model.visual.",),
    "qwen3.5-moe": ("model.visual.",),
    "llama4": ("vision_model.", "multi_modal_projector."),
}


def row_of(name: str) -> tuple[str, str | None]:
    """Return the architecture of a checkpoint, and the type of the text model that it wraps."""
    if name in MAPPED:
        return MAPPED[name].architecture, None
    start, is_wrapper, values = ALL[name]
    if is_wrapper:
        return f"{start}ForConditionalGeneration", values["text_config"]["model_type"]
    kind = getattr(transformers, f"{start}Config").model_type
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], None


def make_checkpoint(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random checkpoint of `ALL` or `MAPPED` with a tokenizer into `folder`."""
    model = random_model(name)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():  # Llama 4's tower has complex ones
            tensor.data = tensor.data.to(dtype)
    if name in MAPPED:
        MAPPED[name].write(model, folder)
    else:
        model.save_pretrained(folder)
    if name == "gemma3":  # the names of published models, which transformers shortens and reads
        rename(folder, lambda old: old.replace("vision_tower.", "vision_tower.vision_model."))
    if name == "qwen3-vl-moe":  # the layout of published models, which transformers reads, too
        _transpose_experts(folder)
    (folder / "tokenizer.json").write_text(tiny_tokenizer())
    return folder


def _transpose_experts(folder: Path) -> None:
    path = folder / "model.safetensors"
    turned = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(turned, path, metadata={"format": "pt"})


def reference_model(name: str, folder: Path) -> Any:
    """Read a checkpoint with its class; of `MAPPED`, return the nearest class with its weights."""
    if name in MAPPED:
        return random_model(name)
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()


def random_model(name: str) -> Any:
    """Build the model of `ALL`, or the nearest one of `MAPPED`, with the same weights each time."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)  # transformers draws decays, to which `randomize` adds
        return _random_model(name)


def _random_model(name: str) -> Any:
    if name in MAPPED:
        mapped = MAPPED[name]
        model = _text_model(mapped.start, mapped.values)
        mapped.build(model)
        randomize(model)
        mapped.finish(model)
        return model.eval()
    start, is_wrapper, values = copy.deepcopy(ALL[name])  # configs change what they are given
    if is_wrapper:
        config = getattr(transformers, f"{start}Config")(**values)
        model = transformers.AutoModelForImageTextToText.from_config(config)
    else:
        model = _text_model(start, values)
    randomize(model)
    return model.eval()


def _text_model(start: str, values: dict[str, Any]) -> Any:
    make_config: Any = getattr(transformers, f"{start}Config")
    known = {field.name for field in dataclasses.fields(make_config)}
    common = {key: value for key, value in COMMON.items() if key in known}
    config = make_config(**(common | values), pad_token_id=None)
    return transformers.AutoModelForCausalLM.from_config(config)


def randomize(model: Any) -> None:
    """Draw all parameters, norms and biases too, so that logits have a σ of about 1."""
    generator = torch.Generator().manual_seed(0)
    embedding = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is embedding
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("sinks", "gate_up_proj_bias")):
                parameter.copy_(4 * noise)  # so that some matter a lot, or are clamped
            elif name.endswith("router.bias"):
                parameter.copy_(noise)  # over what transformers draws
            elif parameter.dim() == 1 or "norm" in name:
                parameter.add_(0.1 * noise)  # to 1 or 0, from which training starts
            elif name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight")):
                parameter.copy_(noise * embedding.shape[1] ** -0.5 if is_tied else noise)
            else:
                is_experts = parameter.dim() == 3  # a matrix for each
                inputs = parameter.shape[-1] if is_experts else parameter[0].numel()
                parameter.copy_(noise * inputs**-0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def rename(folder: Path, change: Callable[[str], str]) -> None:
    """Change the names of a checkpoint's tensors."""
    path = folder / "model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
