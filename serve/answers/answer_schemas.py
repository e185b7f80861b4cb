"""The form of answers, for the OpenAPI document; they are built without these models."""

from typing import Any, Literal

from pydantic import BaseModel

Json = dict[str, Any]


class Usage(BaseModel):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class ChatMessage(BaseModel):
    """A message of a model."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[Json] = []
    function_call: Json | None = None


class AnyChoice(BaseModel):
    """One of `n` answers. stop_reason: the string or id that ended it."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "function_call", "content_filter"]
    stop_reason: str | int | None = None
    logprobs: Json | None


class ChatChoice(AnyChoice):
    """An answer to a conversation."""

    message: ChatMessage


class TextChoice(AnyChoice):
    """A continuation of a prompt."""

    text: str


class AnyAnswer(BaseModel):
    """Fields that chat completions and completions share."""

    id: str
    created: int
    model: str
    usage: Usage
    timings: dict[str, float] | None = None


class ChatAnswer(AnyAnswer):
    """A chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionAnswer(AnyAnswer):
    """A completion."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class MessageAnswer(BaseModel):
    """A message, as Anthropic's clients read it."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Json]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Json


class ResponseAnswer(BaseModel):
    """A response, as OpenAI's clients read it."""

    id: str
    object: Literal["response"]
    status: Literal["completed", "incomplete", "failed"]
    model: str
    output: list[Json]
    usage: Json | None


class ModelRow(BaseModel):
    """A model; the last two only of the one that is loaded."""

    id: str
    object: Literal["model"]
    owned_by: str
    created: int
    max_model_len: int | None = None
    meta: Json | None = None


class ModelRows(BaseModel):
    """Models."""

    object: Literal["list"]
    data: list[ModelRow]


class Tokens(BaseModel):
    """Ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Decoded(BaseModel):
    """The text of ids, under two names."""

    prompt: str
    content: str


def documented(kind: type[BaseModel], *, streams: bool = False) -> dict[int | str, Json]:
    """Return what the document says of an answer with status 200."""
    more = {"content": {"text/event-stream": {"schema": {"type": "string"}}}} if streams else {}
    return {200: {"model": kind, **more}}
