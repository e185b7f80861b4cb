"""Fields that all requests for text share → a plan of `Request`s."""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.request import Request
from exl2flow.engine.filters import GrammarFilter
from exl2flow.serve.answers.answer import AnswerPlan
from exl2flow.serve.answers.bounds import LONGEST_PATTERN, LONGEST_SCHEMA
from exl2flow.serve.answers.fields import Body
from exl2flow.serve.apis.sections import sampler_of
from exl2flow.serve.errors import ApiError
from exl2flow.serve.hosts.engine import Engine

NEUTRAL: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def planned(
    body: Body, engine: Engine, prompts: Sequence[Sequence[int]], given: Mapping[str, Any]
) -> AnswerPlan:
    """Return `n` texts for each prompt, as neighbours.

    Args:
        body: the fields.
        engine: what generates the texts.
        prompts: ids.
        given: further fields of `Request`; `stops` are those of the format, and `negative` is the
            second prompt of a pair.

    Raises:
        ApiError, ConfigError: a field is wrong, or a prompt leaves no room.
    """
    if body.best_of not in (None, body.n):
        raise ApiError(400, "`best_of` is not `n`; leave it out", param="best_of")
    seed = secrets.randbelow(2**31) if body.seed is None or body.seed < 0 else body.seed
    shared = {
        "min_new_tokens": body.min_tokens,
        "settings": settings_of(body, engine),
        "excluded": _excluded(body, engine),
        "banned_strings": [ban for ban in body.banned_strings if ban],
        "heal": body.token_healing,
        "decode_special": not body.skip_special_tokens,
        "raw": body.logprobs_mode == "raw",
        "adapters": engine.adapters_for(body.model, body.lora),
        "salt": body.cache_salt.encode(),
        **given,
        "stops": _stops(body, engine, given["stops"]),
    }
    negative, requests = shared.pop("negative", ()), list[Request]()
    for ids in prompts:
        prompt: Any = ids if body.cfg_scale is None else (tuple(ids), tuple(negative))
        shared["max_new_tokens"] = _most_new(body, engine, len(ids))
        for index in range(body.n):
            requests.append(Request(prompt, seed=seed + index, tag=len(requests), **shared))
    return AnswerPlan(tuple(requests), tuple(map(tuple, prompts)), n=body.n, seed=seed)


def settings_of(body: Body, engine: Engine) -> SamplingSettings:
    """Return the sampler's settings: forced, of the request, the server, the model, or neutral."""
    options, given = engine.options, sampler_of(body)
    values: dict[str, Any] = {**NEUTRAL, **engine.defaults, **options.defaults, **given}
    values |= options.forced
    if body.dynatemp_range is not None:
        middle = values["temperature"]
        values["min_temp"] = max(middle - body.dynatemp_range, 0.0)
        values["max_temp"] = middle + body.dynatemp_range
    if (breakers := body.dry_sequence_breakers) is not None:
        pieces = [*enumerate(engine.tokenizer.pieces)]
        hit = {i for text in {*breakers} - {""} for i, piece in pieces if text in piece}
        values["dry_breakers"] = tuple(sorted(hit))
    values["token_bias"] = tuple((i, bias) for i, bias in _biases(body) if bias > -100)
    return SamplingSettings(**values | options.forced)


def _biases(body: Body) -> list[tuple[int, float]]:
    try:
        return [(int(token), bias) for token, bias in body.logit_bias.items()]
    except ValueError as error:
        raise ConfigError(f"`logit_bias` takes ids as keys: {error}") from error


def _excluded(body: Body, engine: Engine) -> set[int]:
    """Return the ids that are never sampled."""
    tokens = body.banned_tokens
    allowed = [0] if body.allowed_tokens is None else body.allowed_tokens
    if not allowed or not all(0 <= i < engine.width for i in (*tokens, *allowed)):
        why = f"take ids below {engine.width}, and some must be left"
        raise ConfigError(f"`banned_tokens` and `allowed_tokens` {why}")
    found = {*tokens, *(i for i, bias in _biases(body) if bias <= -100)}
    if body.allowed_tokens is not None:
        found |= {*range(engine.width)} - {*allowed}
    return found | {*engine.tokenizer.eos_token_ids} if body.ignore_eos else found


def _stops(body: Body, engine: Engine, own: Sequence[int | str]) -> tuple[int | str, ...]:
    """Return what ends a text: the format's stops and the request's, names of tokens as ids."""
    strings, tokenizer = [text for text in body.stop if text], engine.tokenizer
    special = {tokenizer.backend.id_to_token(i): i for i in tokenizer.special_ids}
    stops = [special.get(text, text) for text in strings]
    kept = [s for s in own if not (body.ignore_eos and s in tokenizer.eos_token_ids)]
    return tuple(dict.fromkeys([*kept, *body.stop_token_ids, *stops]))


def _most_new(body: Body, engine: Engine, prompt: int) -> int | None:
    """Return the limit of new tokens behind a prompt of some, None for all that fit."""
    limits = [n for n in (body.max_tokens, engine.options.max_answer) if n is not None]
    room, wanted = engine.room - prompt, min(limits, default=None)
    if room < (wanted != 0):
        # in words by which agents know that they must shorten it
        why = f"prompt is too long: {prompt} tokens > {engine.room} maximum"
        raise ApiError(400, why, code="context_length_exceeded")
    return None if wanted is None or wanted > room else wanted


def grammar_of(body: Body) -> GrammarFilter | None:
    """Return what the answer must match, not yet tried; raises `ConfigError` for two things."""
    any_object = {"type": "object"} if body.json_object else None
    values: dict[str, Any] = {
        "json_schema": any_object if body.json_schema is None else body.json_schema,
        "regex": body.regex_pattern,
        "gbnf": body.grammar,
        "choice": body.guided_choice,
    }
    given = {name: value for name, value in values.items() if value is not None}
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(f'`{name}`' for name in given)} are two constraints")
    for name, value in given.items():
        most = LONGEST_PATTERN if name == "regex" else LONGEST_SCHEMA
        if len(str(value)) > most:
            raise ConfigError(f"`{name}` has more than {most} characters")
    if body.guided_choice is not None:
        if not body.guided_choice:
            raise ConfigError("`choice` is empty; it takes texts")
        texts = [json.dumps(text, ensure_ascii=False) for text in body.guided_choice]
        return GrammarFilter(lark=f"start: {' | '.join(texts)}", check=False)
    return GrammarFilter(**given, check=False) if given else None
