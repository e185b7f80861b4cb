"""The bounds of all fields of all requests, as the models declare them, and values beyond them."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MaxLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from exl2flow.serve.answers.bounds import Size
from exl2flow.serve.answers.fields import (
    ALIASES,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from exl2flow.serve.apis.messages import MessagesBody
from exl2flow.serve.apis.responses import ResponsesBody
from exl2flow.serve.apis.tabby import DecodeBody, EncodeBody, LlamaBody
from exl2flow.serve.http.admin import AdapterName, AdapterPlace, ModelName

HI = [{"role": "user", "content": "Hi"}]
ANSWERS: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": HI}),
    "/v1/completions": (CompletionBody, {"prompt": "Hi"}),
    "/v1/messages": (MessagesBody, {"messages": HI, "max_tokens": 1}),
    "/v1/responses": (ResponsesBody, {"input": "Hi"}),
    "/completion": (LlamaBody, {"prompt": "Hi"}),
}
# path → model of the body, and the least body
REQUESTS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    **ANSWERS,
    "/v1/messages/count_tokens": ANSWERS["/v1/messages"],
    "/v1/responses/input_tokens": ANSWERS["/v1/responses"],
    "/tokenize": (TokenizeBody, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeBody, {"tokens": [7]}),
    "/v1/token/encode": (EncodeBody, {"text": "Hi"}),
    "/v1/token/decode": (DecodeBody, {"tokens": [7]}),
    "/v1/model/load": (ModelName, {"name": "none"}),
    "/v1/load_lora_adapter": (AdapterPlace, {"lora_name": "none", "lora_path": "none"}),
    "/v1/unload_lora_adapter": (AdapterName, {"lora_name": "none"}),
}
WHOLE = {bool, type(None)}  # kinds that are bounded by themselves
INTERNAL = {"dropped", "left_out", "custom"}  # made of `tools`


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound. words: for people. beyond: a value that is just too large."""

    words: str
    beyond: Any


def bounds(model: type[BaseModel], name: str) -> list[Bound]:
    """Return the bounds of a field; raises `LookupError` for a part without one."""
    field = model.model_fields[name]
    return [*_walk(field.annotation, _limits(field.metadata), "")]


def _limits(metadata: Any) -> dict[str, Any]:
    found = dict[str, Any]()
    for each in metadata:
        if isinstance(each, FieldInfo):
            found |= _limits(each.metadata)
        elif isinstance(each, Size):
            found["size"] = each.most
        elif isinstance(each, MaxLen):
            found["length"] = each.max_length
        elif isinstance(each, Le):
            found["le"] = each.le
        elif isinstance(each, Ge | Gt):
            found["ge"] = each.ge if isinstance(each, Ge) else each.gt
    return found


def _walk(kind: Any, limits: dict[str, Any], part: str) -> Iterator[Bound]:
    """Yield the bounds of a kind of value and of what is in it; part: words for where that is."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal or kind in WHOLE:
        return
    if hasattr(kind, "__metadata__"):  # Annotated
        yield from _walk(kind.__origin__, limits | _limits(kind.__metadata__), part)
    elif origin in (Union, UnionType):
        for each in inner:
            yield from _walk(each, limits, part)
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        least = {name: "a" for name, field in kind.model_fields.items() if field.is_required()}
        for name, field in kind.model_fields.items():
            for one in _walk(field.annotation, _limits(field.metadata), f"{part}`{name}` "):
                yield Bound(one.words, least | {name: one.beyond})
    elif kind is str:
        most = limits["length"]
        yield Bound(f"{part}{most:,} characters", "a" * (most + 1))
    elif kind in (int, float):
        low, high = limits["ge"], limits["le"]
        yield Bound(f"{part}{_number(low)} to {_number(high)}", high * 2 + 1)
        yield Bound("", low - max(9, abs(low)))
    else:
        yield from _of_several(origin, inner, limits, part)


def _of_several(
    origin: Any, inner: tuple[Any, ...], limits: dict[str, Any], part: str
) -> Iterator[Bound]:
    """Yield the bounds of a list or an object, and of its elements."""
    of_any_form = Any in inner or dict in map(get_origin, inner)
    if of_any_form or "size" in limits:
        size = limits["size"]
        text: Any = {"a": "b" * size} if of_any_form else "b" * size
        yield Bound(f"{part}{size:,} bytes", text if origin is dict else [text])
    if origin is dict and of_any_form:
        return
    most = limits["length"]
    yield Bound(f"{part}{most:,} elements", _many(origin, inner, most + 1))
    if origin is dict:
        name, value = inner
        yield from (Bound(one.words, {"7": one.beyond}) for one in _walk(value, {}, "each "))
        yield from (Bound(one.words, {one.beyond: 1}) for one in _walk(name, {}, "names "))
    elif not of_any_form:
        yield from (Bound(one.words, [one.beyond]) for one in _walk(inner[0], {}, "each "))


def _many(origin: Any, inner: tuple[Any, ...], count: int) -> Any:
    if origin is dict:
        return {str(number): 0 for number in range(count)}
    kind = getattr(inner[0], "__origin__", inner[0])
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [{"name": "a"}] * count
    samples: dict[Any, Any] = {int: 7, str: "a", dict: {"role": "user", "content": "a"}}
    return [samples.get(get_origin(kind) or kind, "a")] * count


def _number(value: float) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 20:
        power = abs(value).bit_length() - 1
        return f"{'-' if value < 0 else ''}2^{power}"
    return f"{value:g}"


def names_of(model: type[BaseModel], field: str) -> list[str]:
    """Return the names by which clients may call a field of a request."""
    if issubclass(model, Body):
        made = {"messages": "input"} if model is ResponsesBody else {}
        return [made.get(field, field), *ALIASES.get(field, ())]
    if model is ModelName:
        return ["name", "model_name", "model"]
    return [field]


def table() -> str:
    """Return all bounds as the table of `docs/reference/serving.md`."""
    rows: dict[str, dict[str, None]] = {}
    for model in dict.fromkeys(model for model, _ in REQUESTS.values()):
        for field in model.model_fields:
            found = dict.fromkeys(one.words for one in bounds(model, field) if one.words)
            if found and field not in INTERNAL:
                rows.setdefault("; ".join(found), {})[f"`{names_of(model, field)[0]}`"] = None
    lines = [f"| {', '.join(names)} | {words} |" for words, names in rows.items()]
    return "\n".join(["| fields | bounds |", "|---|---|", *lines])
