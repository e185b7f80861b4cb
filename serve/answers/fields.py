"""The bodies of requests: every field, and the names that other servers have for it.

Ranges are checked where values are used; what is wrong there names the field as well.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic import ModelWrapValidatorHandler as Handler
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticSerializationError, to_json

from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.serve.answers import bounds

_TABLE = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))
ALIASES: Mapping[str, list[str]] = _TABLE["aliases"]
NAMES = {alias: field for field, aliases in ALIASES.items() for alias in aliases}
HARMLESS = frozenset(_TABLE["harmless"])
ALL_THAT_FITS = (-1, -2)  # as lengths in llama.cpp and LM Studio
# fields that say which form a text must have, and others that may hold them
FORMS = ("json_schema", "regex_pattern", "guided_choice", "grammar")
AROUND = ("structured_outputs", "response_format", "output_config", "output_format", "text")
CONTAINERS = frozenset((dict, list))
# kinds of problems, the most telling ones first
TELLING = ("value_error", "too_long", "string_too_long", "less_than_equal", "greater_than_equal")
UNION_TAG = re.compile(r"(constrained-)?(str|int|float|list|dict)|[a-z-]+[\[(].*")


class Json(BaseModel):
    """A body whose texts can be encoded (JSON can spell half a surrogate pair), of some depth.

    dialect: fields that clients of this form know by another name. Errors have the client's names.
    """

    model_config = ConfigDict(allow_inf_nan=False)
    dialect: ClassVar[Mapping[str, str]] = {}
    _names: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def names(self) -> Mapping[str, str]:
        """Fields that the client has called otherwise, and its names."""
        return self._names

    @model_validator(mode="wrap")
    @classmethod
    def _in_words_of_the_client(cls, given: Any, read: Handler[Self]) -> Self:
        names = cls._names_in(given) if isinstance(given, dict) else {}
        try:
            found = read(given)
        except ValidationError as error:
            raise _renamed(error, names) from None
        found._names = names
        return found

    @classmethod
    def _names_in(cls, given: Mapping[str, Any]) -> dict[str, str]:
        """Return the names of a client for our fields, where they differ."""
        used = {name for name in given if given[name] is not None}
        found = {field: name for field, name in cls.dialect.items() if name in used}
        found |= {NAMES[name]: name for name in used & NAMES.keys()}
        around = [name for name in AROUND if name in used]
        if around and not {*FORMS} & (found.keys() | used):
            found |= dict.fromkeys((*FORMS, "response_format"), around[0])
        return {field: name for field, name in found.items() if field not in used}

    @model_validator(mode="before")
    @classmethod
    def _is_sound(cls, given: Any) -> Any:
        level = [given]
        for _ in range(bounds.DEPTH):
            level = [inner for each in level for inner in _within(each)]
        if level:
            raise ValueError(f"the body is nested more than {bounds.DEPTH} levels deep")
        try:
            to_json(given)
        except PydanticSerializationError:
            raise ValueError("a text of the body is broken Unicode: half of a surrogate") from None
        return given


def _within(given: Any) -> Sequence[Any]:
    """Return lists and objects in one of these."""
    values = given.values() if type(given) is dict else given if type(given) is list else ()
    if CONTAINERS.isdisjoint(map(type, values)):  # which is quick for long lists of numbers
        return ()
    return [value for value in values if type(value) in CONTAINERS]


def _renamed(error: ValidationError, names: Mapping[str, str]) -> ValidationError:
    """Return an error with the client's names; the first whose kind fits, of a union."""
    rows = error.errors(include_url=False, include_context=False, include_input=False)
    first = min(
        rows, key=lambda each: (each["type"] not in TELLING, each["type"].endswith("_type"))
    )
    words = first["msg"].replace("{", "{{").replace("}", "}}").removeprefix("Value error, ")
    place = [names.get(str(part), part) for part in first["loc"][:1]]
    place += [p for p in first["loc"][1:] if isinstance(p, int) or not UNION_TAG.fullmatch(p)]
    kind = PydanticCustomError(first["type"], words)  # no literals
    row: InitErrorDetails = {"type": kind, "loc": (*place,), "input": None}
    return ValidationError.from_exception_data(error.title, [row])


class Lora(BaseModel):
    """An adapter of a request."""

    model_config = ConfigDict(allow_inf_nan=False)

    name: bounds.Name
    scale: bounds.Number = 1.0


_KINDS: Mapping[Any, Any] = {float: bounds.Number, int: bounds.Whole, float | None: bounds.Number}
_ROWS: Any = {
    each.name: (
        _KINDS.get(each.type, each.type) | None,
        Field(None, description=each.metadata["description"]),
    )
    for each in fields(SamplingSettings)
    if each.metadata
}
_Sampler: Any = create_model("_Sampler", __base__=Json, **_ROWS)


class Body(_Sampler, Json):  # type: ignore[misc]  # made of rows
    """Fields that chat completions and completions share; a null is as good as no field."""

    model_config = ConfigDict(extra="allow")
    refused: ClassVar[Mapping[str, str]] = {}

    model: bounds.Name = ""
    stream: bool = False
    stream_options: bounds.Wishes = {}
    n: int = Field(1, ge=1, le=bounds.MOST_CHOICES)
    best_of: bounds.Whole | None = None
    seed: bounds.Seed | None = None
    max_tokens: bounds.Count | None = None
    min_tokens: bounds.Count = 0
    stop: bounds.Stops = []
    stop_token_ids: Annotated[list[bounds.Id], bounds.most(bounds.MOST_STOPS)] = []
    ignore_eos: bool = False
    end_loops: bool | None = None
    cfg_scale: bounds.Number | None = None
    dynatemp_range: bounds.Number | None = None
    mirostat: bounds.Whole | None = None
    dry_sequence_breakers: bounds.Breakers | None = None
    negative_prompt: bounds.Text | None = None
    logit_bias: bounds.Biases = {}
    banned_tokens: bounds.IdsOrText = []
    allowed_tokens: bounds.KnownIds | None = None
    banned_strings: bounds.Bans = []
    lora: Annotated[list[Lora], bounds.most(bounds.MOST_ADAPTERS)] | None = None
    cache_salt: bounds.Name = ""
    logprobs_mode: Literal["raw", "sampled"] = "raw"
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    return_tokens_as_token_ids: bool = False
    token_healing: bool = False
    skip_special_tokens: bool = True
    response_format: bounds.Constraint = {}
    structured_outputs: bounds.Constraint = {}
    json_object: bool = False
    json_schema: bounds.Constraint | bounds.Schema | None = None
    regex_pattern: bounds.Pattern | None = None
    guided_choice: bounds.ChoiceTexts | None = None
    grammar: bounds.Schema | None = None

    @model_validator(mode="before")
    @classmethod
    def _by_our_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > bounds.MOST_FIELDS:
            raise ValueError(f"the body has more than {bounds.MOST_FIELDS} fields")
        given = cls.ours(given)
        values, inner = dict[str, Any](), given.get("structured_outputs")
        more = [*(inner.items() if isinstance(inner, dict) else ()), *_form(given)]
        for name, value in [*given.items(), *more]:
            if value is None or (NAMES.get(name, name) == "max_tokens" and value in ALL_THAT_FITS):
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
        text = form.get("pattern", form.get("grammar"))
        if not isinstance(text, str):
            raise ValueError(f"`response_format` of type `{kind}` has no text of one")
        return [(kind, text)]
    inner = form.get("json_schema") or form
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if schema is None and kind == "json_object":
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("`response_format` has no `schema`, a JSON schema")
    return [("json_schema", {"type": "object", **schema} if kind == "json_object" else schema)]


class ChatBody(Body):
    """A request for a chat completion."""

    refused: ClassVar[Mapping[str, str]] = {
        "chat_template": "templates come from the model's files only",
        "audio": "this server makes text only",
    }

    messages: bounds.Messages = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: bounds.Tools = []
    functions: bounds.Tools = []
    tool_choice: bounds.Name | bounds.Wishes = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: bounds.Name | None = None
    reasoning: bounds.Wishes = {}
    enable_thinking: bool | None = None
    thinking: bounds.Wishes = {}
    thinking_budget: int | None = Field(None, ge=-1, le=bounds.LARGEST_COUNT)
    include_reasoning: bool = True
    reasoning_format: bounds.Name | None = None
    chat_template_kwargs: bounds.Variables = {}
    documents: bounds.Documents | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class CompletionBody(Body):
    """A request for completions."""

    prompt: bounds.Prompt
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: bounds.Text | None = None
    add_bos_token: bool = True


class TokenizeBody(Json):
    """A text or a conversation to encode."""

    dialect: ClassVar[Mapping[str, str]] = {"prompt": "content"}

    prompt: bounds.Text = ""
    messages: bounds.Messages | None = None
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

    tokens: bounds.Ids


class ErrorDetail(BaseModel):
    """The content of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The JSON of an error, for the OpenAPI document."""

    error: ErrorDetail
