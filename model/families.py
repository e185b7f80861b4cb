"""The table of families: how each architecture differs from Llama, as data.

A row is written as a difference from a parent row and looked up by the `architectures` string of
`config.json`, and for a wrapper by the `model_type` of its `text_config` too. Defaults are those
that transformers applies when a config omits the key.

Names of tensors are those in EXL2 files, which exllamav2 chose; a row says how stored ones differ.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class WindowRule(StrEnum):
    """Which layers attend within a sliding window."""

    NONE = "none"
    ALL_LAYERS = "all layers"  # every layer, when `sliding_window` is not null
    UPPER_LAYERS = "upper layers"  # by `use_sliding_window`, `layer_types`, `max_window_layers`
    LAYER_TYPES = "layer types"  # by `layer_types`; without them every layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How an architecture's config and graph differ from Llama's.

    A bias field is True or False where the architecture fixes it, and otherwise the config key
    that decides (absent: no bias).

    text_type: `model_type` of the `text_config` that holds the text model's keys; None: they stand
    at the top of the config. is_flat_too: older configs of this wrapper have no `text_config`.
    defaults: values of keys that configs may lack.
    prefix, head: what precedes `layers`, and the name of the head.
    norms: names of the norms before attention and MLP.
    renames: pairs of beginnings, of a stored name and of its name here; the first that fits counts.
    fused: stored linears, and the projections whose rows they hold one after the other.
    carried: beginnings of names that an EXL2 file keeps as they are stored (vision towers).
    left_out: endings of names that nothing needs.
    """

    architecture: str
    model_type: str
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window_rule: WindowRule = WindowRule.NONE
    default_window: int | None = None
    default_max_window_layers: int = 0
    default_head_dim: int | None = None  # None: hidden size / heads
    default_activation: str = "silu"
    default_norm_eps: float = 1e-6
    default_theta: float = 10_000.0
    noise_rows: bool = False  # calibrate on rows of noise too, as vision-language families need
    text_type: str | None = None
    is_flat_too: bool = False
    defaults: tuple[tuple[str, object], ...] = ()
    prefix: str = "model."
    head: str = "lm_head"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    renames: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    carried: tuple[str, ...] = ()
    left_out: tuple[str, ...] = (
        *("rotary_emb.inv_freq", "self_attn.bias", "self_attn.masked_bias"),  # once stored
    )


LLAMA = Family(architecture="LlamaForCausalLM", model_type="llama", mlp_bias="mlp_bias")
MISTRAL = replace(
    LLAMA,
    architecture="MistralForCausalLM",
    model_type="mistral",
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    window_rule=WindowRule.ALL_LAYERS,
    default_window=4096,
)
QWEN2 = replace(
    LLAMA,
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    qkv_bias=True,
    o_bias=False,
    mlp_bias=False,
    window_rule=WindowRule.UPPER_LAYERS,
    default_window=4096,
    default_max_window_layers=28,
)
QWEN3 = replace(
    QWEN2,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    default_head_dim=128,
)

MINISTRAL = replace(
    MISTRAL,
    architecture="MinistralForCausalLM",
    model_type="ministral",
    window_rule=WindowRule.LAYER_TYPES,
)
PHI3 = replace(
    MISTRAL,
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    default_window=None,
    default_norm_eps=1e-5,
    fused=(
        ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    ),
)
SEED_OSS = replace(
    LLAMA,
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    o_bias="attention_out_bias",
    default_head_dim=128,
    defaults=(("attention_bias", True),),
)
YI = replace(LLAMA, architecture="YiForCausalLM", model_type="Yi", norms=("ln1", "ln2"))

LLAVA_MISTRAL = replace(
    MISTRAL,
    architecture="LlavaForConditionalGeneration",
    text_type="mistral",
    defaults=(("num_attention_heads", 32), ("num_key_value_heads", 8)),
    prefix="language_model.model.",
    head="language_model.lm_head",
    renames=(
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("lm_head.", "language_model.lm_head."),
    ),
    carried=("vision_tower.", "multi_modal_projector."),
)
MISTRAL3_MISTRAL = replace(LLAVA_MISTRAL, architecture="Mistral3ForConditionalGeneration")
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
    text_type="qwen3_vl_text",
    window_rule=WindowRule.NONE,
    default_theta=500_000.0,
    prefix="model.language_model.",
    carried=("model.visual.",),
)

ROWS = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, MINISTRAL, PHI3, SEED_OSS, YI),
    *(LLAVA_MISTRAL, MISTRAL3_MISTRAL, QWEN2_VL, QWEN2_5_VL, QWEN3_VL),
)
FAMILIES: dict[tuple[str, str | None], Family] = {
    (row.architecture, row.text_type): row for row in ROWS
}
