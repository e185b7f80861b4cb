"""Configs of tiny models that store all experts of a layer as one tensor, for `checkpoints.py`."""

from typing import Any

from tiny import COMMON

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}
GPT_OSS = {
    "head_dim": 32,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 10,
    "layer_types": ["sliding_attention", "full_attention"],
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
DBRX: dict[str, Any] = {
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 256,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 5000.0},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 5, "moe_top_k": 3},
    "rope_parameters": ROPE,
}
NOT_NORMALIZED = {"ffn_config": DBRX["ffn_config"] | {"moe_normalize_expert_weights": None}}
LLAMA4: dict[str, Any] = {
    "head_dim": 24,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "attn_scale": 0.3,
    "rope_parameters": ROPE,
}
LLAMA4_TOWER = {
    "model_type": "llama4_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
}
PLAIN = {"interleave_moe_layer_step": 1, "use_qk_norm": False, "attn_temperature_tuning": False}

# as `checkpoints.ALL`
PACKED: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "gpt-oss": (
        "GptOss",
        False,
        GPT_OSS | {"rope_parameters": GPT_OSS_ROPE | {"rope_theta": 5000.0}},
    ),
    "dbrx": ("Dbrx", False, DBRX),
    "dbrx-not-normalized": ("Dbrx", False, DBRX | NOT_NORMALIZED),
    "llama4-text": ("Llama4Text", False, LLAMA4),
    "llama4-text-all-experts": ("Llama4Text", False, LLAMA4 | PLAIN),
    "llama4": (
        "Llama4",
        True,
        {
            "text_config": COMMON | {"model_type": "llama4_text"} | LLAMA4,
            "vision_config": LLAMA4_TOWER,
            "tie_word_embeddings": False,
        },
    ),
}
