"""The table of families: how each architecture differs from Llama, as data.

Each `Family` in this module is a row: a difference from its parent row, looked up by the
`architectures` string of `config.json`, and for a wrapper by the `model_type` of its `text_config`
too. Defaults are the ones that transformers applies when a config omits the key.

Names of tensors are those in EXL2 files, which exllamav2 chose; a row says how stored ones differ.
"""

from dataclasses import replace

from exl2flow.kernels import SWIGLU_LIMIT, SWIGLU_SLOPE, Scores
from exl2flow.model.config import expert_rows as rows
from exl2flow.model.config.family import (
    DenseLayers,
    Experts,
    Family,
    HeadNorms,
    MtpNames,
    Multipliers,
    NopeRule,
    Packing,
    WindowRule,
)

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))
TIED = ("tie_word_embeddings", True)
EXPERTS_PACKED = (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))

LLAMA = Family(architecture="LlamaForCausalLM", is_in_exllamav2=True, mlp_bias="mlp_bias")
MISTRAL = Family(
    architecture="MistralForCausalLM",
    is_in_exllamav2=True,
    qkv_bias=False,
    o_bias=False,
    window_rule=WindowRule.ALL_LAYERS,
    default_window=4096,
)
QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    is_in_exllamav2=True,
    qkv_bias=True,
    o_bias=False,
    window_rule=WindowRule.UPPER_LAYERS,
    default_window=4096,
    default_max_window_layers=28,
)
QWEN3 = replace(
    QWEN2,
    architecture="Qwen3ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    head_norms=HeadNorms.HEAD,
    default_head_dim=128,
)
QWEN3_MOE = replace(
    QWEN3,
    architecture="Qwen3MoeForCausalLM",
    default_head_dim=None,
    experts=Experts(default_count=128),
    defaults=(("num_experts_per_tok", 8), ("norm_topk_prob", False)),
)
QWEN2_MOE = replace(
    QWEN2,
    architecture="Qwen2MoeForCausalLM",
    is_in_exllamav2=False,
    qkv_bias="qkv_bias",
    experts=Experts(
        default_count=60,
        shared="mlp.shared_expert",
        shared_width_keys=("shared_expert_intermediate_size",),
        shared_gate="mlp.shared_expert_gate",
    ),
    defaults=(("qkv_bias", True), ("num_experts_per_tok", 4), ("norm_topk_prob", False)),
)
MIXTRAL_EXPERTS = Experts(
    default_count=8,
    width_key="intermediate_size",
    dense=DenseLayers.NONE,
    router="block_sparse_moe.gate",
    is_normalized=True,
    experts="block_sparse_moe.experts",
    linears=(("gate", "w1"), ("up", "w3"), ("down", "w2")),
)
MIXTRAL = replace(
    MISTRAL,
    architecture="MixtralForCausalLM",
    default_window=None,
    experts=MIXTRAL_EXPERTS,
    default_norm_eps=1e-5,
    default_theta=1_000_000.0,
    defaults=(("num_experts_per_tok", 2),),
)
MINIMAX_M2 = replace(
    MIXTRAL,
    architecture="MiniMaxM2ForCausalLM",
    is_in_exllamav2=False,
    window_rule=WindowRule.NONE,
    head_norms=HeadNorms.WHOLE,
    known=("use_qk_norm",),
    rotary_key="rotary_dim",
    default_partial=1.0,
    experts=replace(
        MIXTRAL_EXPERTS,
        scores=Scores.SIGMOID,
        correction="block_sparse_moe.e_score_correction_bias",
    ),
    drafting_key="num_mtp_modules",
    default_norm_eps=1e-6,
    default_theta=5_000_000.0,
    defaults=(("num_experts_per_tok", 8),),
)
OLMOE = Family(
    architecture="OlmoeForCausalLM",
    head_norms=HeadNorms.WHOLE,
    clip_key="clip_qkv",
    known=("clip_qkv",),
    experts=Experts(default_count=64, width_key="intermediate_size", dense=DenseLayers.NONE),
    default_norm_eps=1e-5,
    defaults=(("num_experts_per_tok", 8), ("norm_topk_prob", False)),
)
SIGMOID_EXPERTS = Experts(
    count_keys=("n_routed_experts", "num_local_experts"),
    dense=DenseLayers.FIRST,
    scores=Scores.SIGMOID,
    score_names=("noaux_tc",),
    least_sum=1e-20,
    scaling_key="routed_scaling_factor",
    group_keys=("n_group", "topk_group"),
    correction="mlp.gate.e_score_correction_bias",
    shared="mlp.shared_experts",
    shared_width_keys=("n_shared_experts", "moe_intermediate_size"),
)
DOTS1 = Family(
    architecture="Dots1ForCausalLM",
    head_norms=HeadNorms.HEAD,
    window_rule=WindowRule.UPPER_LAYERS,
    default_window=4096,
    default_max_window_layers=62,
    experts=SIGMOID_EXPERTS,
    defaults=(("use_sliding_window", True), ("norm_topk_prob", False)),
)

MINISTRAL = replace(
    MISTRAL,
    architecture="MinistralForCausalLM",
    is_in_exllamav2=False,
    window_rule=WindowRule.LAYER_TYPES,
)
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16_384,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL3 = replace(
    MISTRAL,
    architecture="Ministral3ForCausalLM",
    is_in_exllamav2=False,
    default_window=None,
    default_head_dim=128,
    default_norm_eps=1e-5,
    query_beta_key="llama_4_scaling_beta",
    defaults=(("rope_parameters", MINISTRAL3_ROPE),),
)
PHI3 = replace(
    MISTRAL,
    architecture="Phi3ForCausalLM",
    default_window=None,
    default_partial=1.0,
    default_norm_eps=1e-5,
    fused=(("self_attn.qkv_proj", QKV), GATE_UP),
)
SEED_OSS = Family(
    architecture="SeedOssForCausalLM",
    o_bias="attention_out_bias",
    default_head_dim=128,
    defaults=(("attention_bias", True),),
    mlp_bias="mlp_bias",
)
YI = replace(LLAMA, architecture="YiForCausalLM", norms=("ln1", "ln2"))
IQUEST = replace(
    LLAMA,
    architecture="IQuestCoderForCausalLM",
    is_in_exllamav2=False,
    fixed=(("use_sliding_window", (False,)),),
    default_head_dim=128,
    default_norm_eps=1e-5,
)

GEMMA = Family(
    architecture="GemmaForCausalLM",
    is_in_exllamav2=True,
    norm_offset=1.0,
    multipliers=Multipliers.GEMMA,
    default_head_dim=256,
    default_activation="gelu_pytorch_tanh",
    needs_bos=True,
    defaults=(TIED,),
)
GEMMA2 = replace(
    GEMMA,
    architecture="Gemma2ForCausalLM",
    keys=(("hidden_act", "hidden_activation"),),
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    residual_scale=2.0**-6,
    window_rule=WindowRule.LAYER_TYPES,
    default_window=4096,
    default_window_pattern=2,
    score_scale_key="query_pre_attn_scalar",
    score_scale_power=-0.5,
    softcap_key="attn_logit_softcapping",
    logit_softcap_key="final_logit_softcapping",
    known=("attn_logit_softcapping", "final_logit_softcapping"),
    defaults=(
        TIED,
        ("query_pre_attn_scalar", 256),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
    ),
)
GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    is_in_exllamav2=False,
    head_norms=HeadNorms.HEAD,
    default_window_pattern=6,
    softcap_key=None,
    default_theta=1_000_000.0,
    local_theta_key="rope_local_base_freq",
    defaults=(
        TIED,
        ("query_pre_attn_scalar", 256),
        ("max_position_embeddings", 131_072),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("vocab_size", 262_208),
    ),
)
GLM = Family(
    architecture="GlmForCausalLM",
    o_bias=False,
    default_head_dim=128,
    default_norm_eps=1.5625e-7,
    interleaved=True,
    default_partial=0.5,
    fused=(GATE_UP,),
    defaults=(("attention_bias", True),),
)
GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    is_in_exllamav2=True,
    post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
)
GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    o_bias=False,
    head_norms=("use_qk_norm", HeadNorms.HEAD),
    known=("use_qk_norm",),
    default_partial=0.5,
    experts=replace(SIGMOID_EXPERTS, default_count=128),
    drafting_key="num_nextn_predict_layers",
    default_drafting=1,
    mtp=MtpNames(
        "enorm", "hnorm", "eh_proj", "shared_head.norm", is_layer=True, reads_normed=False
    ),
    carried=("mtp.",),
    default_norm_eps=1e-5,
    defaults=(("norm_topk_prob", True),),
)
SOLAR_OPEN = Family(
    architecture="SolarOpenForCausalLM",
    o_bias=False,
    default_head_dim=128,
    default_theta=1_000_000.0,
    default_norm_eps=1e-5,
    experts=replace(SIGMOID_EXPERTS, default_count=128, dense=DenseLayers.NONE),
    defaults=(("num_experts_per_tok", 8), ("n_shared_experts", 1), ("norm_topk_prob", True)),
)
COHERE = Family(
    architecture="CohereForCausalLM",
    is_in_exllamav2=True,
    is_parallel=True,
    is_centered=True,
    keys=(("rms_norm_eps", "layer_norm_eps"),),
    default_norm_eps=1e-5,
    head_norms=("use_qk_norm", HeadNorms.HEADS),
    known=("use_qk_norm", "logit_scale"),
    multipliers=Multipliers.COHERE,
    default_theta=500_000.0,
    interleaved=True,
    needs_bos=True,
    defaults=(TIED, ("logit_scale", 0.0625)),
)
COHERE2 = replace(
    COHERE,
    architecture="Cohere2ForCausalLM",
    head_norms=HeadNorms.NONE,
    known=("logit_scale",),
    window_rule=WindowRule.LAYER_TYPES,
    default_window=4096,
    default_window_pattern=4,
    default_theta=10_000.0,
    nope_rule=NopeRule.FULL_LAYERS,
)
GRANITE = replace(
    LLAMA,
    architecture="GraniteForCausalLM",
    multipliers=Multipliers.GRANITE,
    known=("embedding_multiplier", "residual_multiplier", "logits_scaling"),
    score_scale_key="attention_multiplier",
    defaults=(("attention_multiplier", 1.0),),
)
GRANITE_EXPERTS = Experts(
    count_keys=("num_local_experts",),
    default_count=8,
    width_key="intermediate_size",
    dense=DenseLayers.NONE,
    router="block_sparse_moe.router.layer",
    scores=Scores.TOP_SOFTMAX,
    is_normalized=False,
    experts="block_sparse_moe.experts",
    packings=(
        Packing(name="block_sparse_moe.input_linear.weight", projections=("gate_proj", "up_proj")),
        Packing(name="block_sparse_moe.output_linear.weight", projections=("down_proj",)),
    ),
)
GRANITE_MOE = replace(
    GRANITE,
    architecture="GraniteMoeForCausalLM",
    is_in_exllamav2=False,
    mlp_bias=False,
    experts=GRANITE_EXPERTS,
    defaults=(("attention_multiplier", 1.0), ("num_experts_per_tok", 2)),
)
GRANITE_MOE_SHARED_EXPERTS = replace(
    GRANITE_EXPERTS, shared="shared_mlp", shared_width_keys=("shared_intermediate_size",)
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    architecture="GraniteMoeSharedForCausalLM",
    experts=GRANITE_MOE_SHARED_EXPERTS,
    layer_renames=(("shared_mlp.output_linear.", "shared_mlp.down_proj."),),
    fused=(("shared_mlp.input_linear", ("shared_mlp.gate_proj", "shared_mlp.up_proj")),),
)
GRANITE_HYBRID = replace(
    GRANITE,
    architecture="GraniteMoeHybridForCausalLM",
    is_in_exllamav2=False,
    mlp_bias=False,
    keys=(("intermediate_size", "shared_intermediate_size"),),
    nope_rule=NopeRule.POSITION_TYPE,
    layer_renames=(("shared_mlp.output_linear.", "mlp.down_proj."),),
    fused=(("shared_mlp.input_linear", ("mlp.gate_proj", "mlp.up_proj")),),
)
GRANITE_SWA = replace(
    GRANITE,
    architecture="GraniteSWAForCausalLM",
    is_in_exllamav2=False,
    window_rule=WindowRule.LAYER_TYPES,
    default_window=128,
    default_window_pattern=4,
    pattern_begins_full=True,
    layer_theta_key="layer_rope_theta",
    sinks="self_attn.sinks",
    defaults=(TIED, *GRANITE.defaults),
)
GRANITE_MOE_SWA = replace(
    GRANITE_SWA,
    architecture="GraniteMoeSWAForCausalLM",
    mlp_bias=False,
    experts=replace(
        GRANITE_MOE_SHARED_EXPERTS,
        router="block_sparse_moe.router",
        packings=tuple(
            Packing(name=f"block_sparse_moe.experts.{name}", projections=held)
            for name, held in EXPERTS_PACKED
        ),
    ),
    layer_renames=GRANITE_MOE_SHARED.layer_renames,
    fused=GRANITE_MOE_SHARED.fused,
    defaults=GRANITE_MOE.defaults,
)
OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    norms=None,
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    head_norms=HeadNorms.WHOLE,
    default_norm_eps=1e-5,
)
OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    window_rule=WindowRule.LAYER_TYPES,
    default_window=4096,
    default_window_pattern=4,
    default_theta=500_000.0,
    local_theta_key="rope_theta",
    default_local_theta=500_000.0,
)
EXAONE4 = replace(
    OLMO3,
    architecture="Exaone4ForCausalLM",
    qkv_bias=False,
    o_bias=False,
    head_norms=HeadNorms.HEAD,
    default_theta=10_000.0,
    local_theta_key=None,
    nope_rule=NopeRule.FULL_LAYERS_OF_HYBRIDS,
)
SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    window_rule=WindowRule.NOPE_LAYERS,
    default_theta=2_000_000.0,
    nope_rule=NopeRule.LISTED,
    defaults=(TIED,),
    mlp_bias="mlp_bias",
)
ERNIE = Family(
    architecture="Ernie4_5ForCausalLM",
    known=("use_bias",),
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    default_head_dim=128,
    default_norm_eps=1e-5,
    default_theta=500_000.0,
    interleaved=True,
    defaults=(TIED,),
)
ERNIE_EXPERTS = Experts(
    count_keys=("moe_num_experts",),
    default_count=64,
    top_key="moe_k",
    dense=DenseLayers.INTERVAL,
    is_normalized=True,
    least_sum="moe_norm_min",
    correction="mlp.moe_statics.e_score_correction_bias",
    has_wide_correction=True,
    shared="mlp.shared_experts",
    shared_width_keys=("moe_num_shared_experts", "moe_intermediate_size"),
)
ERNIE_MOE = replace(
    ERNIE,
    architecture="Ernie4_5_MoeForCausalLM",
    known=(),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    default_head_dim=None,
    experts=ERNIE_EXPERTS,
    apart=("model.mtp_",),
    defaults=(TIED, ("moe_k", 6), ("moe_num_shared_experts", 2), ("moe_layer_start_index", 1)),
)
HUNYUAN = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    head_norms=HeadNorms.HEAD,
    qk_norms=("query_layernorm", "key_layernorm"),
    known=("use_qk_norm",),
    norm_after_rope=True,
    has_alpha=True,
    default_norm_eps=1e-5,
)
HUNYUAN_MOE = replace(
    HUNYUAN,
    architecture="HunYuanMoEV1ForCausalLM",
    experts=Experts(
        default_count=1,
        top_key="moe_topk",
        width_key="intermediate_size",
        listed_keys=("moe_topk", "num_experts"),
        dense=DenseLayers.NONE,
        router="mlp.gate.wg",
        is_normalized=True,
        shared="mlp.shared_mlp",
        shared_width_keys=("intermediate_size",),
    ),
    defaults=(("moe_topk", 1),),
)
ARCEE = Family(
    architecture="ArceeForCausalLM",
    is_gated=False,
    default_activation="relu2",
    default_norm_eps=1e-5,
    mlp_bias="mlp_bias",
)
NEMOTRON = replace(
    ARCEE,
    architecture="NemotronForCausalLM",
    keys=(("rms_norm_eps", "norm_eps"),),
    default_partial=0.5,
    is_centered=True,
    norm_bias=True,
    norm_offset=1.0,
)
C_FC = (("up", "mlp.c_fc"), ("down", "mlp.c_proj"))
STARCODER2 = replace(
    MISTRAL,
    architecture="Starcoder2ForCausalLM",
    known=("use_bias",),
    keys=(("rms_norm_eps", "norm_epsilon"),),
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    default_window=None,
    is_centered=True,
    norm_bias=True,
    is_gated=False,
    linears=C_FC,
    default_activation="gelu_pytorch_tanh",
    default_norm_eps=1e-5,
    defaults=(TIED, ("use_bias", True)),
)
ORION = Family(
    architecture="OrionForCausalLM",
    is_in_exllamav2=True,
    qkv_bias=False,
    o_bias=False,
    is_centered=True,
    norm_bias=True,
    default_norm_eps=1e-5,
)
INTERNLM2 = Family(
    architecture="InternLM2ForCausalLM",
    is_in_exllamav2=True,
    qkv_bias="bias",
    o_bias="bias",
    norms=("attention_norm", "ffn_norm"),
    linears=(("gate", "feed_forward.w1"), ("up", "feed_forward.w3"), ("down", "feed_forward.w2")),
    renames=(("model.tok_embeddings.", "model.embed_tokens."), ("output.", "lm_head.")),
    layer_renames=(("attention.wo.", "self_attn.o_proj."),),
    fused=(("attention.wqkv", QKV),),
    packed_heads=True,
    defaults=(("bias", True),),
)
MINICPM = Family(
    architecture="MiniCPMForCausalLM",
    is_in_exllamav2=True,
    multipliers=Multipliers.MINICPM,
    known=("scale_emb", "scale_depth"),
    defaults=(TIED,),
)
INDEX = Family(
    architecture="IndexForCausalLM",
    is_in_exllamav2=True,
    qkv_bias=False,
    o_bias=False,
    unit_head_key="norm_head",
    known=("norm_head",),
)
GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    fixed=(("swiglu_limit", (SWIGLU_LIMIT,)), ("swiglu_alpha", (SWIGLU_SLOPE,))),
    default_head_dim=64,
    default_norm_eps=1e-5,
    default_theta=150_000.0,
    window_rule=WindowRule.LAYER_TYPES,
    default_window=128,
    default_window_pattern=2,
    sinks="self_attn.sinks",
    experts=rows.GPT_OSS_EXPERTS,
    defaults=(
        ("attention_bias", True),
        ("num_experts_per_tok", 4),
        ("rope_parameters", rows.GPT_OSS_ROPE),
    ),
)
DBRX = Family(
    architecture="DbrxForCausalLM",
    is_in_exllamav2=True,
    qkv_bias=False,
    o_bias=False,
    sections=rows.DBRX_SECTIONS,
    clip_key="clip_qkv",
    keys=rows.DBRX_KEYS,
    known=("clip_qkv",),
    is_centered=True,
    default_norm_eps=1e-5,
    experts=rows.DBRX_EXPERTS,
    renames=rows.DBRX_RENAMES,
    layer_renames=rows.DBRX_LAYER_RENAMES,
    fused=(("norm_attn_norm.attn.Wqkv", QKV),),
    defaults=rows.DBRX_DEFAULTS,
)
LLAMA4 = Family(
    architecture="Llama4ForCausalLM",
    known=("use_qk_norm",),
    default_head_dim=128,
    default_norm_eps=1e-5,
    default_theta=500_000.0,
    interleaved=True,
    nope_rule=NopeRule.LISTED,
    chunk_key="attention_chunk_size",
    far_query_keys=("attn_temperature_tuning", "attn_scale", "floor_scale"),
    head_norms=("use_qk_norm", HeadNorms.BARE),
    norm_after_rope=True,
    linears=rows.LLAMA4_LINEARS,
    experts=rows.LLAMA4_EXPERTS,
    defaults=rows.LLAMA4_DEFAULTS,
)
GPT2_NAMES = (("h", "layers"), ("wte", "embed_tokens"), ("wpe", "wpe"), ("ln_f", "norm"))
GPT2 = replace(
    STARCODER2,
    architecture="GPT2LMHeadModel",
    keys=(
        ("hidden_size", "n_embd"),
        ("num_hidden_layers", "n_layer"),
        ("num_attention_heads", "n_head"),
        ("max_position_embeddings", "n_positions"),
        ("intermediate_size", "n_inner"),
        ("rms_norm_eps", "layer_norm_epsilon"),
        ("hidden_act", "activation_function"),
    ),
    window_rule=WindowRule.NONE,
    norms=("ln_1", "ln_2"),
    default_inner=4,
    learned_positions="model.wpe",
    nope_rule=NopeRule.ALL_LAYERS,
    renames=tuple(
        (f"{top}{old}.", f"model.{new}.") for top in ("transformer.", "") for old, new in GPT2_NAMES
    ),
    layer_renames=(("attn.c_proj.", "self_attn.o_proj."),),
    fused=(("attn.c_attn", QKV),),
    is_transposed=True,
    left_out=(".attn.bias", ".attn.masked_bias"),
)
BIGCODE = replace(
    GPT2,
    architecture="GPTBigCodeForCausalLM",
    single_head_key="multi_query",
    packed_heads=True,
    is_transposed=False,
)


def wrapped(
    row: Family, text_type: str, architecture: str, renames: tuple[tuple[str, str], ...] = ()
) -> Family:
    """Return a text model's row inside a wrapper with the names of Llava."""
    return replace(
        row,
        architecture=architecture,
        text_type=text_type,
        prefix="language_model.model.",
        head="language_model.lm_head",
        renames=(
            *renames,
            ("model.language_model.", "language_model.model."),
            ("model.vision_tower.", "vision_tower."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
            ("lm_head.", "language_model.lm_head."),
        ),
        carried=("vision_tower.", "multi_modal_projector."),
    )


LLAVA_LLAMA = replace(
    wrapped(LLAMA, "llama", "LlavaForConditionalGeneration"),
    is_in_exllamav2=False,
    defaults=(
        ("hidden_size", 4096),
        ("intermediate_size", 11_008),
        ("num_hidden_layers", 32),
        ("num_attention_heads", 32),
        ("vocab_size", 32_000),
        ("max_position_embeddings", 2048),
    ),
)
LLAVA_MISTRAL = replace(
    wrapped(MISTRAL, "mistral", "LlavaForConditionalGeneration"),
    defaults=(("num_attention_heads", 32), ("num_key_value_heads", 8)),
)
MISTRAL3_MISTRAL = replace(LLAVA_MISTRAL, architecture="Mistral3ForConditionalGeneration")
MISTRAL3_MINISTRAL3 = wrapped(MINISTRAL3, "ministral3", "Mistral3ForConditionalGeneration")
SIGLIP = "vision_tower.vision_model."  # in published files; transformers 5 leaves the second out
GEMMA3_VL = wrapped(
    replace(GEMMA3, is_in_exllamav2=True),
    "gemma3_text",
    "Gemma3ForConditionalGeneration",
    renames=(
        (SIGLIP, SIGLIP),
        (f"model.{SIGLIP}", SIGLIP),
        ("vision_tower.", SIGLIP),
        ("model.vision_tower.", SIGLIP),
    ),
)
LLAMA4_VL = replace(
    wrapped(LLAMA4, "llama4_text", "Llama4ForConditionalGeneration"),
    renames=(("lm_head.", "language_model.lm_head."),),
    carried=("vision_model.", "multi_modal_projector."),
)
QWEN2_VL = replace(
    QWEN2,
    architecture="Qwen2VLForConditionalGeneration",
    text_type="qwen2_vl_text",
    is_flat_too=True,
    default_max_window_layers=80,
    default_norm_eps=1e-5,
    default_theta=1_000_000.0,
    noise_rows=True,
    renames=(("model.language_model.", "model."), ("model.visual.", "visual.")),
    carried=("visual.",),
)
QWEN2_5_VL = replace(
    QWEN2_VL, architecture="Qwen2_5_VLForConditionalGeneration", text_type="qwen2_5_vl_text"
)
QWEN3_VL = replace(
    QWEN3,
    architecture="Qwen3VLForConditionalGeneration",
    is_in_exllamav2=False,
    text_type="qwen3_vl_text",
    window_rule=WindowRule.NONE,
    default_theta=500_000.0,
    prefix="model.language_model.",
    carried=("model.visual.",),
)
QWEN3_VL_PACKINGS = tuple(  # published ones are transposed, transformers 5 writes them untransposed
    Packing(name=f"mlp.experts.{name}", projections=held, is_transposed=True, may_turn=True)
    for name, held in EXPERTS_PACKED
)
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    architecture="Qwen3VLMoeForConditionalGeneration",
    text_type="qwen3_vl_moe_text",
    default_head_dim=None,
    experts=Experts(default_count=60, is_normalized=True, packings=QWEN3_VL_PACKINGS),
    defaults=(("num_experts_per_tok", 4),),
)

EXAONE4_5 = replace(
    EXAONE4,
    architecture="Exaone4_5_ForConditionalGeneration",
    text_type="exaone4",
    earlier_text_type="exaone4_5_text",
    noise_rows=True,
    prefix="model.language_model.",
    carried=("mtp.", "model.visual."),
)
QWEN3_NEXT_EXPERTS = Experts(
    default_count=512,
    packings=QWEN3_VL_PACKINGS,
    shared="mlp.shared_expert",
    shared_width_keys=("shared_expert_intermediate_size",),
    shared_gate="mlp.shared_expert_gate",
)
QWEN3_NEXT = replace(
    QWEN3,
    architecture="Qwen3NextForCausalLM",
    is_in_exllamav2=False,
    window_rule=WindowRule.NONE,
    default_head_dim=256,
    default_partial=0.25,
    norm_offset=1.0,
    has_state=True,
    packed_state=True,
    has_gate=True,
    mtp=MtpNames("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"),
    carried=("mtp.",),
    experts=QWEN3_NEXT_EXPERTS,
    defaults=(
        ("num_key_value_heads", 2),
        ("num_experts_per_tok", 10),
        ("norm_topk_prob", True),
        ("shared_expert_intermediate_size", 512),
    ),
)
QWEN3_5_SWITCHES = (
    ("attn_output_gate", (True,)),
    ("output_gate_type", ("silu", "swish")),  # of the delta rule's norm; attention's is a sigmoid
    ("mtp_use_dedicated_embeddings", (False,)),
)
QWEN3_5_TEXT = replace(
    QWEN3_NEXT,
    architecture="Qwen3_5ForCausalLM",
    fixed=QWEN3_5_SWITCHES,
    packed_state=False,
    experts=None,
    defaults=(("num_key_value_heads", 4),),
)
QWEN3_5 = replace(
    QWEN3_5_TEXT,
    architecture="Qwen3_5ForConditionalGeneration",
    text_type="qwen3_5_text",
    prefix="model.language_model.",
    carried=("mtp.", "model.visual."),
)
QWEN3_5_MOE_TEXT = replace(
    QWEN3_NEXT,
    architecture="Qwen3_5MoeForCausalLM",
    fixed=QWEN3_5_SWITCHES,
    packed_state=False,
    experts=replace(
        QWEN3_NEXT_EXPERTS, default_count=256, dense=DenseLayers.NONE, is_normalized=True
    ),
    defaults=(
        ("num_key_value_heads", 2),
        ("num_experts_per_tok", 8),
        ("shared_expert_intermediate_size", 512),
        ("moe_intermediate_size", 512),
    ),
)
QWEN3_5_MOE = replace(
    QWEN3_5_MOE_TEXT,
    architecture="Qwen3_5MoeForConditionalGeneration",
    text_type="qwen3_5_moe_text",
    prefix="model.language_model.",
    carried=("mtp.", "model.visual."),
)

FAMILIES: dict[tuple[str, str | None], Family] = {
    (row.architecture, row.text_type): row
    for row in [*globals().values()]
    if isinstance(row, Family)
}
