"""Tiny checkpoints of families with experts, as in `checkpoints.ALL`."""

from typing import Any

from checkpoint_values import GRANITE, PARTIAL, QWEN_TOWER, ROPE, mrope, wrapped

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

WITH_EXPERTS: dict[str, tuple[str, bool, dict[str, Any]]] = {
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
    "granite-moe-swa": (
        "GraniteMoeSWA",
        False,
        GRANITE
        | GRANITE_MOE
        | {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]}
        | {"shared_intermediate_size": 32, "layer_rope_theta": [0, 7000.0]},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        True,
        wrapped(
            "qwen3_vl_moe_text",
            QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **mrope(6, 5, 5, mrope_interleaved=True),
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
    "solar-open": ("SolarOpen", False, SIGMOID | {"attention_bias": True, "head_dim": 24}),
    "solar-open-no-shared": (
        "SolarOpen",
        False,
        SIGMOID | {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "head_dim": 32},
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
        SIGMOID
        | {"first_k_dense_replace": 0, "attention_bias": True, "sliding_window": None}
        | {"routed_scaling_factor": 0.6},
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
}
