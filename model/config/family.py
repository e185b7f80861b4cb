"""What a row of the table of families can say: how an architecture differs from Llama."""

from dataclasses import dataclass
from enum import StrEnum


class HeadNorms(StrEnum):
    """What the norms of queries and keys normalize."""

    NONE = "none"
    HEAD = "head"  # each head, all with the same weights
    HEADS = "heads"  # each head, with weights of its own
    WHOLE = "whole"  # the whole projection


class Multipliers(StrEnum):
    """Which keys scale embedding, outputs of sublayers, and logits."""

    NONE = "none"
    GEMMA = "gemma"  # embedding · √hidden
    COHERE = "cohere"  # `logit_scale`
    GRANITE = "granite"  # `embedding_multiplier`, `residual_multiplier`, `logits_scaling`
    MINICPM = "minicpm"  # `scale_emb`, `scale_depth`, `dim_model_base`


class WindowRule(StrEnum):
    """Which layers attend within a sliding window."""

    NONE = "none"
    ALL_LAYERS = "all layers"  # every layer, when `sliding_window` is not null
    UPPER_LAYERS = "upper layers"  # by `use_sliding_window`, `layer_types`, `max_window_layers`
    LAYER_TYPES = "layer types"  # by `layer_types`, else the pattern; without one every layer
    NOPE_LAYERS = "nope layers"  # by `use_sliding_window`, `layer_types`, else the nope rule's list


class NopeRule(StrEnum):
    """Which layers have no positions: neither queries nor keys are rotated."""

    NONE = "none"
    ALL_LAYERS = "all layers"
    FULL_LAYERS = "full layers"  # those without a window
    FULL_LAYERS_OF_HYBRIDS = "full layers of hybrids"  # the same, unless `sliding_window` is null
    LISTED = "listed"  # 0 in `no_rope_layers`, else every `no_rope_layer_interval`-th layer
    POSITION_TYPE = "position type"  # all, unless `position_embedding_type` is `rope`


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How an architecture's config and graph differ from Llama's.

    A bias field is True or False where the architecture fixes it, and otherwise the config key
    that decides (absent: no bias).

    text_type: `model_type` of the `text_config` that holds the text model's keys; None: they stand
    at the top of the config. is_flat_too: older configs of this wrapper have no `text_config`.
    keys: pairs of a key as Llama's configs call it and as these do.
    defaults: values of keys that configs may lack.
    default_window_pattern: n where each n-th layer has no window, for configs without `layer_types`
    and `sliding_window_pattern`; 0: the family has no pattern.
    score_scale_key, score_scale_power: the scale of scores is the key's value to this power; None:
    it is head_dim ** -0.5. softcap_key: the key of the scores' soft-cap.
    nope_rule: which layers have no positions. interleaved: neighbours are rotated as pairs.
    default_partial: the share of a head that is rotated where configs do not say; None: all of it,
    whatever they say. has_alpha: rope type `dynamic` may be a fixed stretch of the base by `alpha`.
    norm_after_rope: queries and keys are
    normalized after their rotation; not together with `interleaved`.
    local_theta_key, default_local_theta: the base of sliding layers, whose rope is not stretched;
    None: all layers have the same rope. query_beta_key: the rope's key of `RopeSpec.query_beta`.
    prefix, head: what precedes `layers`, and the name of the head.
    norms, post_norms: names of the norms before attention and MLP, and of those of their outputs.
    norm_offset: what stored norm weights lack. is_centered: norms subtract the mean (LayerNorm).
    head_norms: what norms of queries and keys normalize, or the key that decides whether there are
    any, and that; qk_norms: their names.
    linears: names of projections by role within a layer, where they are not Llama's.
    is_gated: the MLP multiplies its activation with a second product.
    is_parallel: attention and MLP read the same normed state; the block has one norm.
    residual_scale: a power of two by which hidden states are held smaller, so that they fit fp16.
    needs_bos: texts that are scored begin with BOS, without which the model is incoherent.
    learned_positions: name of an embedding of positions that is added to that of tokens.
    renames: pairs of beginnings, of a stored name and of its name here; the first that fits counts.
    layer_renames: the same within a layer.
    fused: stored linears, and the projections whose rows they hold one after the other.
    packed_heads: fused rows are in groups: queries of a key head, the key head, the value head.
    is_transposed: linears of layers are stored as (in, out).
    default_inner: width of the MLP in hidden sizes where the config omits it; 0: it may not.
    single_head_key: the key that says whether there is one key head.
    unit_head_key: the key that says whether the head's rows are divided by their norms.
    carried: beginnings of names that an EXL2 file keeps as they are stored (vision towers).
    left_out: endings of names that nothing needs.
    """

    architecture: str
    model_type: str
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    head_norms: HeadNorms | tuple[str, HeadNorms] = HeadNorms.NONE
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    window_rule: WindowRule = WindowRule.NONE
    default_window: int | None = None
    default_max_window_layers: int = 0
    default_head_dim: int | None = None  # None: hidden size / heads
    default_activation: str = "silu"
    default_norm_eps: float = 1e-6
    default_theta: float = 10_000.0
    default_window_pattern: int = 0
    score_scale_key: str | None = None
    score_scale_power: float = 1.0
    softcap_key: str | None = None
    nope_rule: NopeRule = NopeRule.NONE
    interleaved: bool = False
    default_partial: float | None = None
    has_alpha: bool = False
    norm_after_rope: bool = False
    local_theta_key: str | None = None
    default_local_theta: float = 10_000.0
    query_beta_key: str | None = None
    noise_rows: bool = False  # calibrate on rows of noise too, as vision-language families need
    text_type: str | None = None
    is_flat_too: bool = False
    keys: tuple[tuple[str, str], ...] = ()
    defaults: tuple[tuple[str, object], ...] = ()
    prefix: str = "model."
    head: str = "lm_head"
    norms: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str, str] | None = None
    norm_offset: float = 0.0
    is_centered: bool = False
    norm_bias: bool = False
    linears: tuple[tuple[str, str], ...] = ()
    is_gated: bool = True
    is_parallel: bool = False
    multipliers: Multipliers = Multipliers.NONE
    residual_scale: float = 1.0
    logit_softcap_key: str | None = None
    needs_bos: bool = False
    learned_positions: str | None = None
    renames: tuple[tuple[str, str], ...] = ()
    layer_renames: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    packed_heads: bool = False
    is_transposed: bool = False
    default_inner: int = 0
    single_head_key: str | None = None
    unit_head_key: str | None = None
    known: tuple[str, ...] = ()  # keys that are refused elsewhere, because they change the graph
    carried: tuple[str, ...] = ()
    left_out: tuple[str, ...] = (
        "rotary_emb.inv_freq",
        "self_attn.bias",
        "self_attn.masked_bias",  # once stored
    )
