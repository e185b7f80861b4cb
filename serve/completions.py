"""A completion's body → a plan: prompts as text or ids, fill-in-the-middle, scores."""

from collections.abc import Sequence
from typing import Any

from exl2flow.core.requests.request import Request
from exl2flow.serve.answers import AnswerPlan
from exl2flow.serve.engine import Engine
from exl2flow.serve.errors import ApiError
from exl2flow.serve.fields import MOST_PROMPTS, CompletionBody
from exl2flow.serve.mapping import common, filter_of, room_for, seed_of

# marks before the text, before what follows it, and before what is missing
FILLING = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral, which reads what follows first
)


def plan_of(body: CompletionBody, engine: Engine) -> AnswerPlan:
    """Return the texts that a body asks for; those of one prompt are neighbours.

    Raises:
        ApiError, Exl2FlowError: a field is wrong, or there is no room.
    """
    prompts = [_ids(prompt, body, engine) for prompt in _prompts(body)]
    fields = common(body, engine, own=engine.tokenizer.eos_token_ids)
    inner, seed = filter_of(body, engine), seed_of(body)
    fields["filters"] = [] if inner is None else [inner]
    fields["end_loops"] = bool(body.end_loops)
    top = body.logprobs or 0
    if body.echo and body.logprobs is not None:
        fields["scores"] = top
    if body.prompt_logprobs is not None:
        fields["scores"] = max(body.prompt_logprobs, fields.get("scores", 0))
    requests = list[Request]()
    for ids in prompts:
        prompt: Any = ids
        if body.cfg_scale is not None:
            prompt = (tuple(ids), tuple(_encoded(body.negative_prompt or "", body, engine)))
        most = room_for(body, engine, ids)
        if most == 0 and "scores" not in fields:
            raise ApiError(400, "`max_tokens` is 0, without `echo` and `logprobs`")
        for index in range(body.n):
            requests.append(
                Request(
                    prompt,
                    max_new_tokens=most,
                    seed=seed + index,
                    probabilities=body.logprobs is not None,
                    top_tokens=top,
                    tag=len(requests),
                    **fields,
                )
            )
    return AnswerPlan(
        requests=tuple(requests), prompts=tuple(map(tuple, prompts)), n=body.n, seed=seed
    )


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    """Return the prompts, of which a list may hold several."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    ids = [each for each in given if isinstance(each, int)]
    if ids and len(ids) == len(given):
        return [ids]
    prompts = [each for each in given if not isinstance(each, int)]
    if ids or not 1 <= len(prompts) <= MOST_PROMPTS:
        raise ApiError(
            400, f"`prompt` takes a text, ids, or 1 to {MOST_PROMPTS} of these", param="prompt"
        )
    return prompts


def _ids(prompt: str | list[int], body: CompletionBody, engine: Engine) -> Sequence[int]:
    if body.suffix:
        if not isinstance(prompt, str):
            raise ApiError(400, "`suffix` goes with a `prompt` given as text", param="suffix")
        return _filling(prompt, body.suffix, engine)
    return _encoded(prompt, body, engine) if isinstance(prompt, str) else prompt


def _encoded(text: str, body: CompletionBody, engine: Engine) -> list[int]:
    return engine.tokenizer.encode(
        text, add_bos=body.add_bos_token, special=engine.options.trust_marks
    )


def _filling(prefix: str, suffix: str, engine: Engine) -> list[int]:
    """Return the ids of a text with a gap.

    Raises:
        ApiError: the vocabulary has no marks for that.
    """
    encode, known = engine.tokenizer.encode, engine.tokenizer.backend.token_to_id
    for names in FILLING:
        marks = [known(name) for name in names if name]
        if None in marks:
            continue
        before, behind, *middle = [i for i in marks if i is not None]
        texts = ([before, *encode(prefix)], [behind, *encode(suffix)])
        first, second = texts if middle else texts[::-1]
        bos = engine.tokenizer.bos_token_id
        return [*([] if bos is None else [bos]), *first, *second, *middle]
    raise ApiError(400, f"`{engine.name}` has no marks for `suffix`", param="suffix")
