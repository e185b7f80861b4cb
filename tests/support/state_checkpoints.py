"""Tiny checkpoints of families with layers that have a state, as in `checkpoints.ALL`."""

from typing import Any

from checkpoint_values import QWEN_TOWER, ROPE, mrope, wrapped

STATES = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
TEXT = STATES | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}
TOWER = QWEN_TOWER | {"num_position_embeddings": 16}

WITH_STATE: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "qwen3.5-text": ("Qwen3_5Text", False, TEXT),
    "qwen3.5": (
        "Qwen3_5",
        True,
        wrapped(
            "qwen3_5_text",
            TOWER,
            **mrope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25),
            **STATES,
        ),
    ),
    "qwen3.5-moe-text": ("Qwen3_5MoeText", False, TEXT | EXPERTS),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        True,
        wrapped(
            "qwen3_5_moe_text",
            TOWER,
            **mrope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25),
            **STATES,
            **EXPERTS,
        ),
    ),
    "qwen3-next": (
        "Qwen3Next",
        False,
        TEXT
        | EXPERTS
        | {"norm_topk_prob": True, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4},
    ),
    "qwen3-next-dense-layers": (
        "Qwen3Next",
        False,
        TEXT | EXPERTS | {"mlp_only_layers": [0], "norm_topk_prob": False},
    ),
}
