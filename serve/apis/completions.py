"""A completion's body → a plan: prompts as text or ids, fill-in-the-middle, scores."""

from collections.abc import Sequence
from typing import cast

from exl2flow.serve.answers.answer import AnswerPlan
from exl2flow.serve.answers.bounds import MOST_PROMPTS
from exl2flow.serve.answers.fields import CompletionBody
from exl2flow.serve.apis.mapping import TextFields, grammar_of, requests_of
from exl2flow.serve.errors import ApiError
from exl2flow.serve.hosts.model_host import ModelHost

# marks before the text, before what follows it, and before what is missing
FILLING = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral, which reads what follows first
)


def plan_of(body: CompletionBody, host: ModelHost) -> AnswerPlan:
    """Return the texts that a body asks for; those of one prompt are neighbours.

    Raises:
        ApiError, Exl2FlowError: a field is wrong, or room is lacking.
    """
    scores = [body.prompt_logprobs, body.logprobs if body.echo else None]
    most = max((top for top in scores if top is not None), default=None)
    if body.max_tokens == 0 and most is None:
        raise ApiError(400, "`max_tokens` is 0, without `echo` and `logprobs`", param="max_tokens")
    grammar = grammar_of(body)
    prompts = [_ids(prompt, body, host) for prompt in _prompts(body)]
    fields = TextFields(
        stops=host.tokenizer.eos_token_ids,
        filters=[] if grammar is None else [grammar],
        decode_special=not body.skip_special_tokens,
        end_loops=bool(body.end_loops),
        probabilities=body.logprobs is not None,
        top_tokens=body.logprobs or 0,
        scores=most,
        negative=_encoded(body.negative_prompt or "", body, host),
    )
    requests = requests_of(body, host, prompts, fields)
    return AnswerPlan(requests, tuple(map(tuple, prompts)), n=body.n)


def _prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [given]
    prompts = cast(list[str | list[int]], given)
    if not prompts:
        why = f"`prompt` takes a text, ids, or 1 to {MOST_PROMPTS} of these"
        raise ApiError(400, why, param="prompt")
    return prompts


def _ids(prompt: str | list[int], body: CompletionBody, host: ModelHost) -> Sequence[int]:
    if isinstance(prompt, str):
        find = _filling if body.suffix else _encoded
        return find(prompt, body, host)
    if body.suffix:
        raise ApiError(400, "`suffix` goes with a `prompt` given as text", param="suffix")
    if wrong := [i for i in prompt if not 0 <= i < host.width]:
        raise ApiError(400, f"`prompt` has the id {wrong[0]}, which is not an id", param="prompt")
    return prompt


def _encoded(text: str, body: CompletionBody, host: ModelHost) -> list[int]:
    trusts = host.options.trust_marks
    return host.tokenizer.encode(text, add_bos=body.add_bos_token, special=trusts)


def _filling(prefix: str, body: CompletionBody, host: ModelHost) -> list[int]:
    """Return the ids of a text with a gap; raises `ApiError` without marks for that."""
    encode, known = host.tokenizer.encode, host.tokenizer.backend.token_to_id
    for names in FILLING:
        marks = [i for name in names if name and (i := known(name)) is not None]
        if len(marks) == sum(map(bool, names)):
            first, second = [marks[0], *encode(prefix)], [marks[1], *encode(body.suffix or "")]
            if len(marks) == 2:
                first, second = second, first
            return [*encode("", add_bos=body.add_bos_token), *first, *second, *marks[2:]]
    raise ApiError(400, f"`{host.name}` has no marks for `suffix`", param="suffix")
