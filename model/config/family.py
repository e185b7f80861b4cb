"""A row of the table of families: how an architecture differs from Llama."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from exl2flow.kernels import Scores


class HeadNorms(StrEnum):
    """Kinds of norms of queries and keys."""

    NONE = "none"
    HEAD = "head"  # each head, all with the same weights
    HEADS = "heads"  # each head, with weights of its own
    WHOLE = "whole"  # the whole projection
    BARE = "bare"  # each head, without weights, in layers that rotate


class Multipliers(StrEnum):
    """Config keys that scale embedding, outputs of sublayers, and logits."""

    NONE = "none"
    GEMMA = "gemma"  # embedding · √hidden
    COHERE = "cohere"  # `logit_scale`
    GRANITE = "granite"  # `embedding_multiplier`, `residual_multiplier`, `logits_scaling`
    MINICPM = "minicpm"  # `scale_emb`, `scale_depth`, `dim_model_base`


class MtpNames(NamedTuple):
    """Names of an MTP block: its first two norms, what joins their outputs, its last norm.

    The embedding is joined first. is_layer: it is stored as a layer behind the model's last one,
    else under `mtp.`. reads_normed: the state that it reads is that behind the model's final norm.
    """

    embedding_norm: str
    state_norm: str
    joint: str
    final_norm: str = "norm"
    is_layer: bool = False
    reads_normed: bool = True


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


class DenseLayers(StrEnum):
    """Which layers have a dense MLP instead of experts."""

    NONE = "none"
    FIRST = "first"  # the first `first_k_dense_replace`
    LISTED = "listed"  # `mlp_only_layers`, and all but each `decoder_sparse_step`-th
    UNLISTED = "unlisted"  # all but `moe_layers`, else but each `interleave_moe_layer_step`-th
    INTERVAL = "interval"  # by `moe_layer_start_index`, `moe_layer_end_index`, `moe_layer_interval`


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """A stored tensor that holds projections of all experts of a layer, (experts, …).

    name: in a layer; projections: names of an expert's, whose rows it holds one after the other;
    part: `weight` or `bias` of them. is_transposed: each expert's matrix is (in, out), or may_turn:
    unless it fits the other way only; is_interleaved: rows of the projections alternate; is_flat:
    the experts follow each other along the first of two axes.
    """

    name: str
    projections: tuple[str, ...]
    part: str = "weight"
    is_transposed: bool = False
    may_turn: bool = False
    is_interleaved: bool = False
    is_flat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Differences of a family's experts from those of Qwen3-MoE.

    Fields that end in `_key` or `_keys` are config keys; names of tensors are those in a layer of
    EXL2 files.
    """

    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts")  # the first that is there
    default_count: int | None = None
    top_key: str = "num_experts_per_tok"
    width_key: str = "moe_intermediate_size"
    dense_width_key: str = "intermediate_size"  # of layers without experts
    listed_keys: tuple[str, ...] = ()  # may be lists with an item for each layer
    dense: DenseLayers = DenseLayers.LISTED
    activation: str | None = None  # of the kernels; None: as the config says
    bias: bool | str = False  # of the experts' linears, as the bias fields of `Family`

    # the router
    router: str = "mlp.gate"
    router_bias: bool = False
    scores: Scores = Scores.SOFTMAX
    score_names: tuple[str, ...] = ()  # what `scoring_func` may be, beside the name of `scores`
    # whether the weights of a token are divided by their sum, or the key that decides
    is_normalized: bool | str = "norm_topk_prob"
    # the power of the norm that they are divided by, instead of their sum; where null, by nothing
    norm_power_key: str | None = None
    least_sum: float | str = 0.0  # that they are divided by, or the key of it
    scaling_key: str | None = None  # what multiplies them
    group_keys: tuple[str, str] | None = None  # number of groups, and of the chosen ones
    correction: str | None = None  # tensor that is added to scores where experts are chosen
    has_wide_correction: bool = False  # it is (1, experts)
    scales_input: bool = False

    # an expert, and the one that every token passes
    experts: str = "mlp.experts"
    linears: tuple[tuple[str, str], ...] = (
        ("gate", "gate_proj"),
        ("up", "up_proj"),
        ("down", "down_proj"),
    )
    packings: tuple[Packing, ...] = ()
    shared: str | None = None
    shared_width_keys: tuple[str, ...] = ()  # the product of their values is its width; may be 0
    shared_gate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Differences of an architecture's config and graph from Llama's.

    A bias field is True or False where the architecture fixes it, and otherwise the config key
    that decides (absent: no bias).
    """

    architecture: str
    # `model_type` of the `text_config` that holds the text model's keys; None: they are at the top
    text_type: str | None = None
    earlier_text_type: str | None = None  # which the first files of the wrapper have
    is_flat_too: bool = False  # older configs of this wrapper have no `text_config`
    keys: tuple[tuple[str, str], ...] = ()  # a key as Llama's configs call it, and as these do
    sections: tuple[str, ...] = ()  # objects whose keys count as if they were not in one
    # the only values that keys may have, where a config has them
    fixed: tuple[tuple[str, tuple[object, ...]], ...] = ()
    defaults: tuple[tuple[str, object], ...] = ()  # values of keys that configs may lack
    known: tuple[str, ...] = ()  # keys that are refused elsewhere, because they change the graph
    default_activation: str = "silu"
    default_norm_eps: float = 1e-6
    default_inner: int = 0  # MLP width in hidden sizes where the config omits it; 0: it may not
    needs_bos: bool = False  # scored texts begin with BOS, without which the model is incoherent
    is_in_exllamav2: bool = False  # 0.3.2 loads the architecture's EXL2 files
    noise_rows: bool = False  # calibrate on rows of noise too, as vision-language families need

    # attention
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    default_head_dim: int | None = None  # None: hidden size / heads
    single_head_key: str | None = None  # says whether there is one key head
    # of queries and keys; or the key that decides whether there are any, and which
    head_norms: HeadNorms | tuple[str, HeadNorms] = HeadNorms.NONE
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")  # their names
    # they follow the rotation; together with `interleaved` only without weights
    norm_after_rope: bool = False
    window_rule: WindowRule = WindowRule.NONE
    default_window: int | None = None
    default_max_window_layers: int = 0
    chunk_key: str | None = None  # positions of a chunk, in chunked layers, which rotate
    # n where each n-th layer has no window, for configs without `layer_types` and
    # `sliding_window_pattern`; 0: the family has no pattern
    default_window_pattern: int = 0
    pattern_begins_full: bool = False  # with that layer, instead of ending with it
    # scores are multiplied by the key's value to this power; None: by head_dim ** -0.5
    score_scale_key: str | None = None
    score_scale_power: float = 1.0
    softcap_key: str | None = None  # of scores
    # tensor in a layer: a score of each head, of a position without a value
    sinks: str | None = None
    clip_key: str | None = None  # the most that elements of queries, keys and values may have

    # layers with a state, of `layer_types` or but each `full_attention_interval`-th
    has_state: bool = False
    packed_state: bool = False  # their products read one matrix each, with rows by key head
    has_gate: bool = False  # q_proj has the logits of what the output of attention is multiplied by

    # positions
    nope_rule: NopeRule = NopeRule.NONE
    learned_positions: str | None = None  # an embedding of positions, added to that of tokens
    interleaved: bool = False  # neighbours are rotated as pairs
    # the share of a head that is rotated where configs do not say; None: all, whatever they say
    default_partial: float | None = None
    rotary_key: str | None = None  # dimensions of a head that are rotated, where no share is given
    has_alpha: bool = False  # rope type `dynamic` may be a fixed stretch of the base by `alpha`
    default_theta: float = 10_000.0
    layer_theta_key: str | None = None  # of a list of each layer's base; 0: it has no positions
    # the base of sliding layers, whose rope is not stretched; None: all layers have the same rope
    local_theta_key: str | None = None
    default_local_theta: float = 10_000.0
    query_beta_key: str | None = None  # in the rope's keys, see `RopeSpec.query_beta`
    # keys that say whether queries of layers without positions are scaled, by how much, and after
    # how many positions
    far_query_keys: tuple[str, str, str] | None = None

    # layers
    mlp_bias: bool | str = False
    is_gated: bool = True  # the MLP multiplies its activation with a second product
    is_parallel: bool = False  # attention and MLP read the same normed state; there is one norm
    norm_offset: float = 0.0  # what stored norm weights lack
    is_centered: bool = False  # norms subtract the mean (LayerNorm)
    norm_bias: bool = False
    multipliers: Multipliers = Multipliers.NONE
    residual_scale: float = 1.0  # a power of two: hidden states are held smaller, to fit fp16
    logit_softcap_key: str | None = None
    unit_head_key: str | None = None  # says whether the head's rows are divided by their norms

    experts: Experts | None = None  # instead of an MLP, in all layers or some
    # number of layers behind the last one, which draft tokens, and which nothing here needs
    drafting_key: str | None = None
    default_drafting: int = 0

    # names of tensors
    prefix: str = "model."  # precedes `layers`
    head: str = "lm_head"
    norms: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str, str] | None = None  # of the outputs of attention and MLP
    linears: tuple[tuple[str, str], ...] = ()  # (role, name in a layer) where it is not Llama's
    renames: tuple[tuple[str, str], ...] = ()  # (beginning as stored, here); the first match counts
    layer_renames: tuple[tuple[str, str], ...] = ()  # the same within a layer
    # stored linears, and the projections whose rows they hold one after the other
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    packed_heads: bool = False  # fused rows are groups: queries of a key head, key head, value head
    is_transposed: bool = False  # linears of layers are stored as (in, out)
    mtp: MtpNames | None = None  # of a block that predicts one token more
    carried: tuple[str, ...] = ()  # beginnings of names that EXL2 files keep as stored: towers
    apart: tuple[str, ...] = ()  # beginnings of names that nothing needs
    left_out: tuple[str, ...] = (  # endings of names that nothing needs
        "rotary_emb.inv_freq",
        "self_attn.bias",
        "self_attn.masked_bias",
    )
