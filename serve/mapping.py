"""Fields of a request → `Request`, its sampler's settings, filters and stops."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.request import Filter
from exl2flow.inference.filters import GrammarFilter, SelectFilter, lark_of
from exl2flow.serve.engine import Engine
from exl2flow.serve.errors import ApiError
from exl2flow.serve.fields import MOST_STOPS, Body

NEUTRAL: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
SAMPLER = tuple(each.name for each in fields(SamplingSettings))
OFF = -1  # of fields that others switch off so
MOST_SCHEMA = 256 << 10  # characters


def settings_of(body: Body, engine: Engine) -> SamplingSettings:
    """Return the sampler's settings: of the request, else of the model, else neutral."""
    given = {name: v for name in SAMPLER if (v := getattr(body, name, None)) is not None}
    values: dict[str, Any] = {**NEUTRAL, **engine.defaults, **given}
    for name in ("top_k", "dry_range"):
        if values.get(name) == OFF:
            values[name] = 0
    if body.mirostat is not None:
        if body.mirostat not in (0, 2):
            raise ConfigError(f"`mirostat` is {body.mirostat}; it must be 0 or 2")
        values["mirostat"] = body.mirostat == 2
    if body.dynatemp_range is not None:
        middle = values["temperature"]
        values["min_temp"] = max(middle - body.dynatemp_range, 0.0)
        values["max_temp"] = middle + body.dynatemp_range
    if (breakers := body.dry_sequence_breakers) is not None:
        texts = several(breakers)
        pieces = enumerate(engine.tokenizer.pieces)
        values["dry_breakers"] = tuple(
            [i for i, piece in pieces if any(t in piece for t in texts if t)]
        )
    values["token_bias"] = tuple([(i, b) for i, b in _biases(body) if b > -100])
    return SamplingSettings(**values)


def _biases(body: Body) -> list[tuple[int, float]]:
    try:
        return [(int(token), bias) for token, bias in body.logit_bias.items()]
    except ValueError as error:
        raise ConfigError(f"`logit_bias` takes ids as keys: {error}") from error


def several(given: str | Sequence[str]) -> list[str]:
    """Return texts, which may be one."""
    return [given] if isinstance(given, str) else [*given]


def excluded_of(body: Body, engine: Engine) -> set[int]:
    """Return the ids that are never sampled."""
    tokens = body.banned_tokens
    if isinstance(tokens, str):  # as TabbyAPI takes them
        tokens = [int(t) for t in tokens.replace(",", " ").split() if t.isdecimal()]
    found = {*tokens, *(i for i, bias in _biases(body) if bias <= -100)}
    if body.allowed_tokens is not None:
        found |= {*range(engine.width)} - {*body.allowed_tokens}
    if body.ignore_eos:
        found |= {*engine.tokenizer.eos_token_ids}
    return found


def stops_of(body: Body, engine: Engine, own: Sequence[int | str]) -> tuple[int | str, ...]:
    """Return what ends a text: the format's stops and the request's, names of tokens as ids."""
    strings = [text for text in several(body.stop) if text]
    if len(strings) > MOST_STOPS:
        raise ConfigError(f"`stop` has {len(strings)} texts; it takes {MOST_STOPS} at most")
    ids = {i: engine.tokenizer.backend.token_to_id(i) for i in strings}
    special = engine.tokenizer.special_ids
    stops = [s if (i := ids[s]) is None or i not in special else i for s in strings]
    kept = [s for s in own if not (body.ignore_eos and s in engine.tokenizer.eos_token_ids)]
    return tuple(dict.fromkeys([*kept, *body.stop_token_ids, *stops]))


def filter_of(body: Body, engine: Engine) -> Filter | None:
    """Return what the answer must match, compiled in a process of its own first.

    Raises:
        ConfigError: it is broken, takes too much, or there are two of them.
    """
    found = {name: value for name, value in _constraints(body).items() if value is not None}
    if len(found) > 1:
        raise ConfigError(f"{', '.join(f'`{name}`' for name in found)} are two constraints")
    if not found:
        return None
    [(name, value)] = found.items()
    if name == "choice":
        return SelectFilter(value)
    if len(str(value)) > MOST_SCHEMA:
        raise ConfigError(f"`{name}` has more than {MOST_SCHEMA} characters")
    value = lark_of(value) if name == "lark" else value
    given = GrammarFilter(**{name: value})
    engine.trial.check(given)
    return given


def _constraints(body: Body) -> dict[str, Any]:
    """Return the constraints of all fields, by the arguments of `GrammarFilter`, and choices."""
    structured = body.structured_outputs or {}
    schema, form = body.json_schema, body.response_format or {}
    kind = form.get("type", "text")
    if kind == "json_schema":
        inner = form.get("json_schema") or form
        of_form = inner.get("schema", {}) if isinstance(inner, Mapping) else None
        if not isinstance(of_form, Mapping):
            raise ConfigError("`response_format` has no `schema`, a JSON schema")
        if schema is not None:
            raise ConfigError("`response_format` and `json_schema` are two constraints")
        schema = dict(of_form)
    elif kind == "json_object" or structured.get("json_object"):
        schema = {"type": "object"} if schema is None else schema
    elif kind == "regex" or kind == "grammar":
        structured = {kind: form.get("pattern") or form.get("grammar"), **structured}
    elif kind != "text":
        raise ConfigError(f"`response_format` is {kind!r:.40}; it takes text, json_object, …")
    pairs = {
        "json_schema": (schema, structured.get("json")),
        "regex": (body.regex_pattern, structured.get("regex")),
        "lark": (body.grammar, structured.get("grammar")),
        "choice": (body.guided_choice, structured.get("choice")),
    }
    for name, values in pairs.items():
        if None not in values:
            raise ConfigError(f"`{name}` is given twice")
    return {name: next((v for v in vs if v is not None), None) for name, vs in pairs.items()}


def seed_of(body: Body) -> int:
    """Return the seed of the first choice, a new one if there is none."""
    return secrets.randbelow(2**31) if body.seed is None or body.seed < 0 else body.seed


def common(body: Body, engine: Engine, *, own: Sequence[int | str]) -> dict[str, Any]:
    """Return the fields of `Request` that chat completions and completions share."""
    if body.best_of not in (None, body.n):
        raise ApiError(400, "`best_of` is not `n`; leave it out", param="best_of")
    return {
        "min_new_tokens": body.min_tokens,
        "settings": settings_of(body, engine),
        "stops": stops_of(body, engine, own),
        "excluded": excluded_of(body, engine),
        "banned_strings": [ban for ban in several(body.banned_strings) if ban],
        "heal": body.token_healing,
        "decode_special": not body.skip_special_tokens,
        "raw": body.logprobs_mode == "raw",
        "adapters": engine.adapters,
    }


def room_for(body: Body, engine: Engine, prompt: Sequence[int]) -> int | None:
    """Return the limit of new tokens, None for all that fit.

    Raises:
        ApiError: the prompt leaves no room.
    """
    wanted = body.max_tokens
    if engine.options.max_answer is not None:
        wanted = min(wanted or engine.options.max_answer, engine.options.max_answer)
    room = engine.room - len(prompt)
    if room < (wanted != 0):
        raise ApiError(
            400,
            f"the prompt has {len(prompt)} tokens, there is room for {engine.room} in all; "
            "shorten it",
            code="context_length_exceeded",
        )
    return None if wanted is None or wanted > room else wanted


def log_of(probability: float) -> float:
    """Return the logarithm of a probability, for zero the least that JSON readers bear."""
    return max(math.log(probability), -9999.0) if probability > 0 else -9999.0
