"""The table of families: how each architecture differs from Llama, as data.

A row is written as a difference from a parent row and looked up by the `architectures` string of
`config.json`. Defaults are those that transformers applies when a config omits the key.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class WindowRule(StrEnum):
    """Which layers attend within a sliding window."""

    NONE = "none"
    ALL_LAYERS = "all layers"  # every layer, when `sliding_window` is not null
    UPPER_LAYERS = "upper layers"  # by `use_sliding_window`, `layer_types`, `max_window_layers`


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How an architecture's config and graph differ from Llama's.

    A bias field is True or False where the architecture fixes it, and otherwise the config key
    that decides (absent: no bias).
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

FAMILIES: dict[str, Family] = {row.architecture: row for row in (LLAMA, MISTRAL, QWEN2, QWEN3)}
