"""A chat completion's body → a plan: messages, functions, thoughts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.request import Filter
from exl2flow.engine.chat import tool_grammar
from exl2flow.engine.chat.history import Reader
from exl2flow.engine.filters import GrammarFilter, Phases
from exl2flow.model.text import messages as turns
from exl2flow.model.text.repairs import joined
from exl2flow.serve.answers.answer import AnswerPlan
from exl2flow.serve.answers.fields import ChatBody
from exl2flow.serve.apis.chat_tools import Tools, has_grammar, tools_of
from exl2flow.serve.apis.mapping import TextFields, grammar_of, requests_of
from exl2flow.serve.errors import ApiError
from exl2flow.serve.hosts.model_host import NO_TOOLS, ModelHost

GENERIC = (
    "You may call these functions:\n<tools>\n{tools}\n</tools>\nTo call one, write an object with "
    "`name` and `arguments` between <tool_call> and </tool_call>."
)
DESCRIBED = "the grammar of a custom tool is described to the model, not forced"


def plan_of(body: ChatBody, host: ModelHost, more: Iterable[str] = ()) -> AnswerPlan:
    """Return the texts that a body asks for; more: further warnings.

    Raises:
        ApiError, Exl2FlowError: a field is wrong, or room is lacking.
    """
    reader, tools, warnings = reader_of(host), tools_of(body), list[str]()
    fmt = host.tool_format if tools.offered else None
    variables, budget = _thinking(body, reader, warnings)
    ids, opened = _prompt(body, host, tools.offered, variables, warnings)
    marks, template = reader.format.thinking, reader.format.template
    if marks and not (opened or marks.open in template or marks.close in template):
        marks = None  # the model does not know them
    grammar = _grammar(body, host, tools, warnings)
    filters: list[Filter] = [] if grammar is None else [grammar]
    if marks and (grammar is not None or budget is not None):
        filters = [Phases(marks, opened=opened, budget=budget, then=grammar)]
    negative = [{"role": "user", "content": body.negative_prompt or ""}]
    fields = TextFields(
        stops=reader.stops,
        filters=filters,
        decode_special=not body.skip_special_tokens or fmt is not None or reader.hides_marks,
        end_loops=body.end_loops is not False,
        probabilities=body.logprobs,
        top_tokens=body.top_logprobs if body.logprobs else 0,
        negative=() if body.cfg_scale is None else reader.prompt(negative)[0],
    )
    is_inline = "inline" in (body.reasoning_format, host.options.reasoning_field)
    is_inline |= body.reasoning_format == "none" or _goes_on(body)  # behind its thoughts, if any
    return AnswerPlan(
        requests_of(body, host, [ids], fields),
        (tuple(ids),),
        n=body.n,
        marks=None if is_inline else marks,
        opened=opened,
        tools=tuple(tools.allowed),
        tool_format=fmt,
        shows_calls=host.has_grammars and body.stream,
        warnings=(*warnings, *more),
    )


def length_of(body: ChatBody, host: ModelHost) -> int:
    """Return the tokens of a prompt; raises as `plan_of`, but not where room is lacking."""
    variables, _ = _thinking(body, reader_of(host), [])
    return len(_prompt(body, host, tools_of(body).offered, variables, [])[0])


def _prompt(
    body: ChatBody,
    host: ModelHost,
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    warnings: list[str],
) -> tuple[list[int], bool]:
    """Return the ids of a conversation, and whether they begin thoughts."""
    messages, is_generic = messages_of(body.messages), host.tool_format.is_generic
    if tools and is_generic:
        if host.options.strict:
            raise ApiError(400, NO_TOOLS, param="tools")
        warnings.append(NO_TOOLS)
        messages = _with_tools(messages, tools)

    return reader_of(host).prompt(
        messages,
        tools=None if is_generic else tools or None,
        variables=variables,
        goes_on=_goes_on(body),
        trusts=host.options.trust_marks,
    )


def _grammar(
    body: ChatBody, host: ModelHost, tools: Tools, warnings: list[str]
) -> GrammarFilter | None:
    """Return what answers must match: valid calls, or text of what else is asked for."""
    answer = grammar_of(body)
    if any(map(has_grammar, body.tools)):
        warnings.append(DESCRIBED)
    if not host.has_grammars and tools.choice in ("required", "named"):
        why = "needs grammars, which this server does not have; send `auto`"
        raise ApiError(400, f"`tool_choice` {why}", param="tool_choice")
    if not tools.offered or not host.has_grammars:
        return answer
    forced = tool_grammar(
        host.tool_format,
        tools.allowed,
        host.tokenizer,
        choice=tools.choice,
        name=tools.name,
        parallel=body.parallel_tool_calls and not body.functions,
        answer=answer,
        check=False,
    )
    warnings += forced.warnings
    return forced.filter


def reader_of(host: ModelHost) -> Reader:
    """Return what writes conversations; raises `ApiError` if the model has no prompt format."""
    if host.reader is None:
        why = f"`{host.name}` has no chat template; start the server with `--format NAME`, or use"
        raise ApiError(400, f"{why} /v1/completions", code="no_chat_template", param="messages")
    return host.reader


def _with_tools(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages whose system prompt describes functions."""
    shown = turns.tools_of(tools) or []
    text = GENERIC.format(tools="\n".join(json.dumps(t, ensure_ascii=False) for t in shown))
    if messages[0]["role"] == "system":
        text = f"{messages.pop(0)['content']}\n\n{text}"
    return [{"role": "system", "content": text}, *messages]


def _thinking(
    body: ChatBody, reader: Reader, warnings: list[str]
) -> tuple[dict[str, Any], int | None]:
    """Return the template's variables, and the budget of thoughts."""
    given = {**body.reasoning, **body.thinking}
    effort = body.reasoning_effort or given.get("effort")
    budgets = (body.thinking_budget, given.get("budget_tokens"), given.get("max_tokens"))
    budget = next((b for b in budgets if b is not None), None)
    if not isinstance(budget, int | None):
        raise ConfigError(f"`thinking_budget` is {budget!r:.40}; it must be an integer")
    by_type = {"enabled": True, "disabled": False}.get(str(given.get("type")))
    wishes = (body.enable_thinking, given.get("enabled"), by_type)
    enabled = next((bool(wish) for wish in wishes if wish is not None), None)
    if effort == "none":
        effort, enabled = None, False
    wanted = {"enable_thinking": enabled, "reasoning_effort": effort, "documents": body.documents}
    variables = {k: v for k, v in wanted.items() if v is not None} | body.chat_template_kwargs
    for name in sorted(variables.keys() - reader.template.mentioned):
        warnings.append(f"the template does not mention {name}")
    return variables, None if budget == -1 else budget


def _goes_on(body: ChatBody) -> bool:
    last = body.messages[-1]
    is_asked = body.continue_final_message or not body.add_generation_prompt or last.get("prefix")
    return last.get("role") == "assistant" and bool(is_asked)


def messages_of(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates read them: text only, neighbours of one role joined.

    Raises:
        ApiError: a message has no role, or a part that is not text.
    """
    messages = list[dict[str, Any]]()
    for number, message in enumerate(given):
        role, where = message.get("role"), f"`messages` [{number}]"
        if not isinstance(role, str):
            raise ApiError(400, f"{where} has no `role`", param="messages")
        role = "system" if role == "developer" else role
        values = {k: v for k, v in message.items() if k != "prefix"}
        messages.append(values | {"role": role, "content": _text(message.get("content"), where)})
    return joined(turns.values_of(messages))


def _text(content: object, where: str) -> str:
    try:
        return turns.text_of(content, where)
    except ConfigError as error:
        raise ApiError(400, str(error), code="unsupported_content", param="messages") from error
