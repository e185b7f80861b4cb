"""Rows of the table of families: what they say of packed experts, and of config keys in objects."""

from exl2flow.kernels import Scores
from exl2flow.model.config.family import DenseLayers, Experts, Packing

GATE_UP, DOWN = ("gate_proj", "up_proj"), ("down_proj",)


def _in_both_forms(name: str, projections: tuple[str, ...]) -> tuple[Packing, ...]:
    """Return where gpt-oss stores projections: (in, out) in bf16, else (out, in) in mxfp4."""
    start, alternate = f"mlp.experts.{name}", len(projections) > 1
    return (
        Packing(name=start, projections=projections, is_transposed=True, is_interleaved=alternate),
        Packing(name=f"{start}_blocks", projections=projections, is_interleaved=alternate),
        Packing(
            name=f"{start}_bias", projections=projections, part="bias", is_interleaved=alternate
        ),
    )


GPT_OSS_EXPERTS = Experts(
    count_keys=("num_local_experts", "num_experts"),
    default_count=128,
    width_key="intermediate_size",
    dense=DenseLayers.NONE,
    activation="clamped_swiglu",
    bias=True,
    router="mlp.router",
    router_bias=True,
    scores=Scores.TOP_SOFTMAX,
    is_normalized=False,
    packings=(*_in_both_forms("gate_up_proj", GATE_UP), *_in_both_forms("down_proj", DOWN)),
)
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

DBRX_SECTIONS = ("attn_config", "ffn_config", "ffn_config.ffn_act_fn")
DBRX_KEYS = (
    ("hidden_size", "d_model"),
    ("num_hidden_layers", "n_layers"),
    ("num_attention_heads", "n_heads"),
    ("num_key_value_heads", "kv_n_heads"),
    ("max_position_embeddings", "max_seq_len"),
    ("hidden_act", "name"),
)
DBRX_EXPERTS = Experts(
    count_keys=("moe_num_experts",),
    default_count=4,
    top_key="moe_top_k",
    width_key="ffn_hidden_size",
    dense=DenseLayers.NONE,
    router="block_sparse_moe.gate",
    norm_power_key="moe_normalize_expert_weights",
    experts="block_sparse_moe.experts",
    linears=(("gate", "w1"), ("up", "v1"), ("down", "w2")),
    packings=(
        Packing(name="ffn.experts.mlp.w1", projections=("w1",), is_flat=True),
        Packing(name="ffn.experts.mlp.v1", projections=("v1",), is_flat=True),
        Packing(name="ffn.experts.mlp.w2", projections=("w2",), is_flat=True, is_transposed=True),
    ),
)
DBRX_DEFAULTS = (
    ("kv_n_heads", 1),
    ("moe_top_k", 1),
    ("ffn_hidden_size", 3584),
    ("moe_normalize_expert_weights", 1.0),
)
DBRX_RENAMES = (
    ("transformer.wte.", "model.embed_tokens."),
    ("transformer.norm_f.", "model.norm."),
    ("transformer.blocks.", "model.layers."),
)
DBRX_LAYER_RENAMES = (
    ("norm_attn_norm.norm_1.", "input_layernorm."),
    ("norm_attn_norm.norm_2.", "post_attention_layernorm."),
    ("norm_attn_norm.attn.out_proj.", "self_attn.o_proj."),
    ("ffn.router.layer.", "block_sparse_moe.gate."),
)

LLAMA4_EXPERTS = Experts(
    count_keys=("num_local_experts",),
    default_count=16,
    width_key="intermediate_size",
    dense_width_key="intermediate_size_mlp",
    dense=DenseLayers.UNLISTED,
    router="feed_forward.router",
    scores=Scores.TOP_SIGMOID,
    is_normalized=False,
    scales_input=True,
    experts="feed_forward.experts",
    packings=(
        Packing(name="feed_forward.experts.gate_up_proj", projections=GATE_UP, is_transposed=True),
        Packing(name="feed_forward.experts.down_proj", projections=DOWN, is_transposed=True),
    ),
    shared="feed_forward.shared_expert",
    shared_width_keys=("intermediate_size",),
)
LLAMA4_LINEARS = (
    ("gate", "feed_forward.gate_proj"),
    ("up", "feed_forward.up_proj"),
    ("down", "feed_forward.down_proj"),
)
LLAMA4_DEFAULTS = (
    ("intermediate_size", 8192),
    ("intermediate_size_mlp", 16_384),
    ("num_attention_heads", 40),
    ("num_key_value_heads", 8),
    ("num_experts_per_tok", 1),
    ("use_qk_norm", True),
    ("attention_chunk_size", 8192),
)
