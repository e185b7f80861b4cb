"""Values of configs that several tiny checkpoints share."""

from typing import Any

from tiny import COMMON

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}
TOWER = {"hidden_size": 32, "num_heads": 2, "patch_size": 4, "depth": 1}
QWEN_TOWER = TOWER | {"out_hidden_size": 64, "intermediate_size": 48}
EXAONE_TOWER = QWEN_TOWER | {"num_key_value_heads": 2}
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


def mrope(*sections: int, **others: object) -> dict[str, Any]:
    """Return a config's rope whose positions are triples."""
    return {"rope_parameters": ROPE | {"mrope_section": sections} | others}


def wrapped(kind: str, tower: dict[str, Any], **text: object) -> dict[str, Any]:
    """Return the config of a wrapper around a text model."""
    text = COMMON | {"model_type": kind, "rope_parameters": ROPE} | text
    tied = text.pop("tie_word_embeddings")
    return {"text_config": text, "vision_config": tower, "tie_word_embeddings": tied}
