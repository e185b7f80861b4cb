"""Fields that all requests for text share → `Request`s."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.request import Filter, Request
from exl2flow.engine.filters import GrammarFilter
from exl2flow.serve.answers.bounds import LONGEST_PATTERN, LONGEST_SCHEMA
from exl2flow.serve.answers.fields import Body
from exl2flow.serve.apis.sections import sampler_of
from exl2flow.serve.errors import ApiError
from exl2flow.serve.hosts.model_host import ModelHost

NEUTRAL: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFields:
    """Fields of `Request` that each API finds in its own way; see there.

    stops: of the format. negative: ids of the second prompt of a pair.
    """

    stops: Sequence[int | str]
    filters: Sequence[Filter]
    decode_special: bool
    end_loops: bool
    probabilities: bool
    top_tokens: int
    scores: int | None = None
    negative: Sequence[int] = ()


def requests_of(
    body: Body, host: ModelHost, prompts: Sequence[Sequence[int]], given: TextFields
) -> tuple[Request, ...]:
    """Return `n` texts for each prompt, as neighbours.

    Args:
        body: the fields that all requests for text share.
        host: what generates the texts.
        prompts: ids.
        given: the fields that depend on the API.

    Raises:
        ApiError, ConfigError: a field is wrong, or a prompt leaves no room.
    """
    if body.best_of not in (None, body.n):
        raise ApiError(400, "`best_of` is not `n`; leave it out", param="best_of")
    seed = secrets.randbelow(2**31) if body.seed is None or body.seed < 0 else body.seed
    settings, excluded = settings_of(body, host), _excluded(body, host)
    adapters = host.adapters_for(body.model, body.lora)
    stops, requests = _stops(body, host, given.stops), list[Request]()
    for ids in prompts:
        most = _most_new(body, host, len(ids))
        for index in range(body.n):
            request = Request(
                ids if body.cfg_scale is None else (tuple(ids), tuple(given.negative)),
                max_new_tokens=most,
                min_new_tokens=body.min_tokens,
                settings=settings,
                seed=seed + index,
                stops=stops,
                excluded=excluded,
                banned_strings=[ban for ban in body.banned_strings if ban],
                heal=body.token_healing,
                decode_special=given.decode_special,
                probabilities=given.probabilities,
                top_tokens=given.top_tokens,
                raw=body.logprobs_mode == "raw",
                scores=given.scores,
                filters=given.filters,
                adapters=adapters,
                salt=body.cache_salt.encode(),
                end_loops=given.end_loops,
                tag=len(requests),
            )
            requests.append(request)
    return tuple(requests)


def settings_of(body: Body, host: ModelHost) -> SamplingSettings:
    """Return the sampler's settings: forced, of the request, the server, the model, or neutral."""
    options, given = host.options, sampler_of(body)
    values: dict[str, Any] = {**NEUTRAL, **host.defaults, **options.defaults, **given}
    if body.dynatemp_range is not None:
        middle = values["temperature"]
        values["min_temp"] = max(middle - body.dynatemp_range, 0.0)
        values["max_temp"] = middle + body.dynatemp_range
    if (breakers := body.dry_sequence_breakers) is not None:
        pieces = [*enumerate(host.tokenizer.pieces)]
        hit = {i for text in {*breakers} - {""} for i, piece in pieces if text in piece}
        values["dry_breakers"] = tuple(sorted(hit))
    values["token_bias"] = tuple((i, bias) for i, bias in _biases(body) if bias > -100)
    return SamplingSettings(**values | options.forced)


def _biases(body: Body) -> list[tuple[int, float]]:
    try:
        return [(int(token), bias) for token, bias in body.logit_bias.items()]
    except ValueError as error:
        raise ConfigError(f"`logit_bias` takes ids as keys: {error}") from error


def _excluded(body: Body, host: ModelHost) -> set[int]:
    tokens = body.banned_tokens
    allowed = [0] if body.allowed_tokens is None else body.allowed_tokens
    if not allowed or not all(0 <= i < host.width for i in (*tokens, *allowed)):
        why = f"take ids below {host.width}, and some must be left"
        raise ConfigError(f"`banned_tokens` and `allowed_tokens` {why}")
    found = {*tokens, *(i for i, bias in _biases(body) if bias <= -100)}
    if body.allowed_tokens is not None:
        found |= {*range(host.width)} - {*allowed}
    return found | {*host.tokenizer.eos_token_ids} if body.ignore_eos else found


def _stops(body: Body, host: ModelHost, own: Sequence[int | str]) -> tuple[int | str, ...]:
    """Return what ends a text: the format's stops and the request's, names of tokens as ids."""
    strings, tokenizer = [text for text in body.stop if text], host.tokenizer
    special = {tokenizer.backend.id_to_token(i): i for i in tokenizer.special_ids}
    stops = [special.get(text, text) for text in strings]
    kept = [s for s in own if not (body.ignore_eos and s in tokenizer.eos_token_ids)]
    return tuple(dict.fromkeys([*kept, *body.stop_token_ids, *stops]))


def _most_new(body: Body, host: ModelHost, prompt: int) -> int | None:
    """Return the limit of new tokens behind a prompt of some, None for all that fit."""
    limits = [n for n in (body.max_tokens, host.options.max_answer) if n is not None]
    room, wanted = host.room - prompt, min(limits, default=None)
    if room < (wanted != 0):
        # in words by which agents know that they must shorten it
        why = f"prompt is too long: {prompt} tokens > {host.room} maximum"
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
