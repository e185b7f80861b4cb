"""The bodies of requests: every field, and the names that other servers have for it.

Ranges are checked where values are used; what is wrong there names the field as well.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from exl2flow.core.options.sampling import SamplingSettings

MOST_STOPS, MOST_PROMPTS, MOST_CHOICES, MOST_TOOLS = 64, 64, 8, 128
DEPTH = 64  # of lists and objects within each other
_TABLE = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))
ALIASES: Mapping[str, list[str]] = _TABLE["aliases"]
NAMES = {alias: field for field, aliases in ALIASES.items() for alias in aliases}
HARMLESS = frozenset(_TABLE["harmless"])


class Json(BaseModel):
    """A body whose texts can be encoded (JSON can spell half a surrogate pair), of some depth."""

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _is_sound(cls, given: Any) -> Any:
        try:
            json.dumps(given, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text of the body is broken Unicode: half of a surrogate") from None
        level = [given]
        for _ in range(DEPTH):
            inner = [v.values() if isinstance(v, dict) else v for v in level]
            level = [v for vs in inner if not isinstance(vs, str) for v in vs if _has_items(v)]
        if level:
            raise ValueError(f"the body is nested more than {DEPTH} levels deep")
        return given


def _has_items(value: object) -> bool:
    return isinstance(value, dict | list)


class Lora(Json):
    """An adapter of a request."""

    name: str
    scale: float = 1.0


_ROWS: Any = {
    each.name: (cast(Any, each.type) | None, Field(None, description=each.metadata["description"]))
    for each in fields(SamplingSettings)
    if each.metadata
}
_Sampler: Any = create_model("_Sampler", __base__=Json, **_ROWS)


class Body(_Sampler, Json):
    """Fields that chat completions and completions share; a null is as good as no field."""

    model_config = ConfigDict(extra="allow")
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
    cfg_scale: float | None = None
    dynatemp_range: float | None = None
    mirostat: int | None = None
    dry_sequence_breakers: str | list[str] | None = None
    negative_prompt: str | None = None
    logit_bias: dict[str, float] = {}
    banned_tokens: list[int] | str = []
    allowed_tokens: list[int] | None = None
    banned_strings: str | list[str] = []
    lora: list[Lora] | None = None
    cache_salt: str = ""
    logprobs_mode: Literal["raw", "sampled"] = "raw"
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    return_tokens_as_token_ids: bool = False
    token_healing: bool = False
    skip_special_tokens: bool = True
    response_format: dict[str, Any] = {}
    structured_outputs: dict[str, Any] = {}
    json_object: bool = False
    json_schema: dict[str, Any] | str | None = None
    regex_pattern: str | None = None
    guided_choice: list[str] | None = None
    grammar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _by_our_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = cls.ours(given)
        values, inner = dict[str, Any](), given.get("structured_outputs")
        more = [*(inner.items() if isinstance(inner, dict) else ()), *_form(given)]
        for name, value in [*given.items(), *more]:
            if value is None:
                continue
            if name in cls.refused:
                raise ValueError(f"`{name}`: {cls.refused[name]}")
            field = NAMES.get(name, name)
            if values.setdefault(str(field), value) != value:
                raise ValueError(f"`{name}` and another name of `{field}` have different values")
        if values.get("grammar") == "":  # as SillyTavern sends it
            del values["grammar"]
        if values.get("cfg_scale") == 1:  # the prompt alone
            del values["cfg_scale"]
        if isinstance(bound := values.get("end_loops"), int):
            values["end_loops"] = bool(bound)  # of the field that is a length
        return values

    @classmethod
    def ours(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a dialect as those of completions; raises `ValueError`."""
        return given

    @property
    def ignored(self) -> set[str]:
        """Names of fields that have no effect."""
        return {*(self.model_extra or ())}


def _form(given: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the field that `response_format` stands for."""
    form = given.get("response_format")
    if not isinstance(form, dict) or (kind := form.get("type", "text")) == "text":
        return []
    if kind not in ("json_object", "json_schema", "regex", "grammar"):
        raise ValueError(f"`response_format` has the type {kind!r:.40}; it takes json_schema, …")
    if kind in ("regex", "grammar"):
        return [(kind, form.get("pattern", form.get("grammar")))]
    inner = form.get("json_schema") or form
    schema = inner.get("schema", {}) if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise ValueError("`response_format` has no `schema`, a JSON schema")
    return [("json_schema", {"type": "object", **schema} if kind == "json_object" else schema)]


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


class TokenizeBody(Json):
    """A text or a conversation to encode."""

    prompt: str = ""
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    parse_special: bool = True
    return_token_strs: bool = False

    @model_validator(mode="before")
    @classmethod
    def _of_llama(cls, given: Any) -> Any:
        """Read `content` as llama.cpp does: without BOS, unless `add_special` asks for it."""
        if not isinstance(given, dict) or "content" not in given:
            return given
        named = {"prompt": given["content"], "add_special_tokens": given.get("add_special", False)}
        return {**given, **named}


class DetokenizeBody(Json):
    """Ids to decode."""

    tokens: list[int]


class ErrorDetail(BaseModel):
    """What an error says."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The JSON of an error, for the OpenAPI document."""

    error: ErrorDetail
