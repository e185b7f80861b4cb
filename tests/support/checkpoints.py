"""Tiny checkpoints that transformers writes itself, one or more for each family."""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from mapped import MAPPED
from packed_configs import PACKED
from safetensors.torch import load_file, save_file
from tiny import COMMON, tiny_tokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}
TOWER = {"hidden_size": 32, "num_heads": 2, "patch_size": 4, "depth": 1}
QWEN_TOWER = TOWER | {"out_hidden_size": 64, "intermediate_size": 48}
VIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
PIXTRAL = VIT | {"model_type": "pixtral", "head_dim": 16}
CLIP = VIT | {"model_type": "clip_vision_model", "projection_dim": 32}
SIGLIP = VIT | {"model_type": "siglip_vision_model", "vision_use_head": False}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.5 * i for i in range(6)],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
MINISTRAL3 = {
    "head_dim": 24,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
PARTIAL = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
MIXED = {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA2 = {"head_dim": 24, "query_pre_attn_scalar": 40, "tie_word_embeddings": True} | MIXED
LINEAR = ROPE | {"rope_type": "linear", "rope_theta": 70_000.0, "factor": 8.0}
GEMMA3 = GEMMA2 | {"rope_parameters": {"sliding_attention": ROPE, "full_attention": LINEAR}}
# eps of norms are large where their key is not the usual one, so that it matters which is read
COHERE = {
    "layer_norm_eps": 0.01,
    "logit_scale": 0.75,
    "tie_word_embeddings": True,
    "rope_parameters": ROPE,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.25,
    "tie_word_embeddings": True,
    "rope_parameters": ROPE,
}
GRANITE4 = GRANITE | {
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "layer_types": ["full_attention", "full_attention"],
}
GPT2 = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 96,
    "n_positions": 256,
    "layer_norm_epsilon": 0.01,
    "tie_word_embeddings": True,
}


def _mrope(*sections: int, **others: object) -> dict[str, Any]:
    return {"rope_parameters": ROPE | {"mrope_section": sections} | others}


def _wrapped(kind: str, tower: dict[str, Any], **text: object) -> dict[str, Any]:
    text = COMMON | {"model_type": kind, "rope_parameters": ROPE} | text
    tied = text.pop("tie_word_embeddings")
    return {"text_config": text, "vision_config": tower, "tie_word_embeddings": tied}


MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
GRANITE_MOE = {"num_local_experts": 6, "num_experts_per_tok": 3}
SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
    "rope_parameters": ROPE,
}
ERNIE_MOE = {
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_intermediate_size": 32,
    "moe_num_shared_experts": 2,
    "rope_parameters": ROPE,
}
QWEN2_MOE = MOE | {"shared_expert_intermediate_size": 32, "rope_parameters": ROPE}


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
    "llava-llama": ("Llava", True, _wrapped("llama", CLIP)),
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
    "gemma3": ("Gemma3", True, _wrapped("gemma3_text", SIGLIP, **GEMMA3, mm_tokens_per_image=4)),
    "glm": ("Glm", False, {"head_dim": 24} | PARTIAL),
    "glm4": ("Glm4", False, {"head_dim": 24} | PARTIAL),
    "cohere": ("Cohere", False, COHERE),
    "cohere-qk-norm": ("Cohere", False, COHERE | {"use_qk_norm": True}),
    "cohere2": ("Cohere2", False, COHERE | MIXED),
    "granite": ("Granite", False, GRANITE),
    "granite4": ("GraniteMoeHybrid", False, GRANITE4 | {"position_embedding_type": "rope"}),
    "granite4-no-rope": (
        "GraniteMoeHybrid",
        False,
        GRANITE4 | {"position_embedding_type": "nope"},
    ),
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
    "mistral3-ministral3": (
        "Mistral3",
        True,
        _wrapped("ministral3", PIXTRAL, **MINISTRAL3),
    ),
    "gpt2": ("GPT2", False, GPT2),
    "mixtral": (
        "Mixtral",
        False,
        {"num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": ROPE},
    ),
    "qwen2-moe": ("Qwen2Moe", False, QWEN2_MOE),
    "qwen2-moe-dense-layers": (
        "Qwen2Moe",
        False,
        QWEN2_MOE | {"norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen3-moe": ("Qwen3Moe", False, MOE | {"head_dim": 24, "norm_topk_prob": True}),
    "qwen3-moe-sparse-step": ("Qwen3Moe", False, MOE | {"decoder_sparse_step": 2}),
    "granite-moe": ("GraniteMoe", False, GRANITE | GRANITE_MOE),
    "granite-moe-shared": (
        "GraniteMoeShared",
        False,
        GRANITE | GRANITE_MOE | {"shared_intermediate_size": 32},
    ),
    "granite-moe-not-shared": (
        "GraniteMoeShared",
        False,
        GRANITE | GRANITE_MOE | {"shared_intermediate_size": 0, "tie_word_embeddings": False},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        True,
        _wrapped(
            "qwen3_vl_moe_text",
            QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **_mrope(6, 5, 5, mrope_interleaved=True),
            **MOE,
            head_dim=32,
            mlp_only_layers=[0],
        ),
    ),
    "olmoe": (
        "Olmoe",
        False,
        {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 0.9, "rope_parameters": ROPE},
    ),
    "olmoe-normalized": (
        "Olmoe",
        False,
        {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}
        | {"attention_bias": True},
    ),
    "glm4-moe": (
        "Glm4Moe",
        False,
        SIGMOID | PARTIAL | {"use_qk_norm": True, "attention_bias": True, "head_dim": 24},
    ),
    "glm4-moe-one-group": (
        "Glm4Moe",
        False,
        SIGMOID
        | PARTIAL
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0}
        | {"n_shared_experts": 2},
    ),
    "dots1": (
        "Dots1",
        False,
        SIGMOID
        | {"norm_topk_prob": True, "sliding_window": 10, "max_window_layers": 1, "head_dim": 24},
    ),
    "dots1-not-normalized": (
        "Dots1",
        False,
        SIGMOID | {"first_k_dense_replace": 0, "attention_bias": True, "sliding_window": None},
    ),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        False,
        ERNIE_MOE | {"moe_norm_min": 0.6, "tie_word_embeddings": True},
    ),
    "ernie4.5-moe-interval": (
        "Ernie4_5_Moe",
        False,
        ERNIE_MOE
        | {"moe_layer_start_index": 0, "moe_layer_interval": 2}
        | {"moe_num_shared_experts": 0},
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        False,
        {"num_experts": 6, "moe_topk": [2, 4], "head_dim": 24, "tie_word_embeddings": True}
        | {"rope_parameters": ROPE | {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan-moe-biases": (
        "HunYuanMoEV1",
        False,
        {"num_experts": 5, "moe_topk": 2, "head_dim": 16, "attention_bias": True},
    ),
    "minimax-m2": (
        "MiniMaxM2",
        False,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 24, "rotary_dim": 12}
        | {"rope_parameters": ROPE},
    ),
    **PACKED,
    "gpt-bigcode": ("GPTBigCode", False, GPT2),
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
    "qwen3-vl-moe": ("model.visual.",),
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
