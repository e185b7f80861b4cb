"""The bodies of requests: every field, and the names that other servers have for it.

Ranges are checked where values are used; what is wrong there names the field as well.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_STOPS, MOST_PROMPTS, MOST_CHOICES, MOST_TOOLS = 64, 64, 8, 128

# field → its names in OpenAI's, vLLM's, llama-server's and TabbyAPI's interfaces
ALIASES: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_completion_tokens", "max_output_tokens", "max_length", "n_predict"),
    "min_tokens": ("min_length",),
    "stop": ("stop_sequences", "stop_sequence"),
    "ignore_eos": ("ban_eos_token",),
    "typical": ("typical_p",),
    "min_temp": ("dynatemp_low",),
    "max_temp": ("dynatemp_high",),
    "temp_exponent": ("dynatemp_exponent",),
    "repetition_penalty": ("rep_pen", "repeat_penalty"),
    "repetition_range": ("penalty_range", "repeat_last_n"),
    "dry_range": ("dry_penalty_last_n",),
    "mirostat": ("mirostat_mode",),
    "banned_tokens": ("custom_token_bans",),
    "allowed_tokens": ("allowed_token_ids",),
    "banned_strings": ("bad_words",),
    "cfg_scale": ("guidance_scale",),
    "add_bos_token": ("add_special_tokens",),
    "json_schema": ("guided_json",),
    "regex_pattern": ("guided_regex",),
    "guided_choice": ("choice",),
    "grammar": ("grammar_string", "guided_grammar"),
    "thinking_budget": (
        "thinking_token_budget",
        "reasoning_budget_tokens",
        "reasoning_budget",
    ),
    "chat_template_kwargs": ("template_vars",),
    "end_loops": ("loop_detect_window",),
}
NAMES = {alias: field for field, aliases in ALIASES.items() for alias in aliases}
# have no effect here, and clients need not know
HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"),
        *("cache_control", "cache_prompt", "sampler_priority"),
    }
)


class _Unicode(BaseModel):
    """A body whose texts can be encoded; JSON can spell halves of surrogate pairs."""

    @model_validator(mode="before")
    @classmethod
    def _is_unicode(cls, given: Any) -> Any:
        try:
            json.dumps(given, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text of the body is broken Unicode: half of a surrogate") from None
        return given


class Body(_Unicode):
    """Fields that chat completions and completions share; a null is as good as no field."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    refused: ClassVar[Mapping[str, str]] = {}

    model: str = ""
    stream: bool = False
    stream_options: dict[str, Any] = {}
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    best_of: int | None = None
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int = Field(0, ge=0)
    stop: str | list[str] = []
    stop_token_ids: list[int] = Field([], max_length=MOST_STOPS)
    ignore_eos: bool = False
    end_loops: bool | None = None

    temperature: float | None = None
    temperature_last: bool | None = None
    smoothing_factor: float | None = None
    min_temp: float | None = None
    max_temp: float | None = None
    temp_exponent: float | None = None
    dynatemp_range: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    top_a: float | None = None
    min_p: float | None = None
    tfs: float | None = None
    typical: float | None = None
    skew: float | None = None
    repetition_penalty: float | None = None
    repetition_range: int | None = None
    repetition_decay: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_range: int | None = None
    dry_max_ngram: int | None = None
    dry_counts: bool | None = None
    dry_sequence_breakers: str | list[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    cfg_scale: float | None = None
    negative_prompt: str | None = None
    logit_bias: dict[str, float] = {}
    banned_tokens: list[int] | str = []
    allowed_tokens: list[int] | None = None
    banned_strings: str | list[str] = []

    logprobs_mode: Literal["raw", "sampled"] = "raw"
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    return_tokens_as_token_ids: bool = False
    token_healing: bool = False
    skip_special_tokens: bool = True

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | str | None = None
    regex_pattern: str | None = None
    guided_choice: list[str] | None = None
    grammar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _by_our_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        values = dict[str, Any]()
        for name, value in given.items():
            if value is None:
                continue
            if name in cls.refused:
                raise ValueError(f"`{name}`: {cls.refused[name]}")
            field = str(NAMES.get(name, name))
            if values.setdefault(field, value) != value:
                raise ValueError(f"`{name}` and another name of `{field}` have different values")
        if isinstance(bound := values.get("end_loops"), int):
            values["end_loops"] = bool(bound)  # of the field that is a length
        return values

    @property
    def unknown(self) -> list[str]:
        """Names of fields that have no effect, and ought to."""
        return sorted((self.model_extra or {}).keys() - HARMLESS)


class ChatBody(Body):
    """A request for a chat completion."""

    refused: ClassVar[Mapping[str, str]] = {
        "chat_template": "templates come from the model's files only",
        "audio": "this server makes text only",
    }

    messages: list[dict[str, Any]] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[dict[str, Any]] = Field([], max_length=MOST_TOOLS)
    functions: list[dict[str, Any]] = Field([], max_length=MOST_TOOLS)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] = {}
    enable_thinking: bool | None = None
    thinking: dict[str, Any] = {}
    thinking_budget: int | None = Field(None, ge=-1)
    include_reasoning: bool = True
    reasoning_format: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class CompletionBody(Body):
    """A request for completions."""

    prompt: str | list[int | str | list[int]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: str | None = None
    add_bos_token: bool = True


class TokenizeBody(_Unicode):
    """A text or a conversation to encode."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    add_generation_prompt: bool = True


class DetokenizeBody(BaseModel):
    """Ids to decode."""

    tokens: list[int]
