"""A chat completion's body → a plan: messages, functions, thoughts."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from exl2flow.core.errors import ChatTemplateError, ConfigError
from exl2flow.core.requests.conversation import Thinking
from exl2flow.core.requests.request import Filter, Request
from exl2flow.inference.chat import tool_grammar
from exl2flow.inference.chat.history import Reader
from exl2flow.inference.chat.tool_grammar import Choice
from exl2flow.inference.filters import Phases
from exl2flow.serve.answers import AnswerPlan
from exl2flow.serve.engine import Engine
from exl2flow.serve.errors import ApiError
from exl2flow.serve.fields import ChatBody
from exl2flow.serve.mapping import common, filter_of, room_for, seed_of

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
GENERIC = (
    "You may call these functions:\n<tools>\n{tools}\n</tools>\nTo call one, write an object with "
    "`name` and `arguments` between <tool_call> and </tool_call>."
)
CHOICES: Mapping[str, Choice] = {
    "auto": "auto",
    "required": "required",
    "any": "required",
    "none": "none",
}


def reader_of(engine: Engine) -> Reader:
    """Return what writes conversations; raises `ApiError` if the model has no prompt format."""
    if engine.reader is None:
        raise ApiError(
            400,
            f"`{engine.name}` has no chat template; start the server with `--format NAME`, or use "
            "/v1/completions",
            code="no_chat_template",
            param="messages",
        )
    return engine.reader


def plan_of(body: ChatBody, engine: Engine) -> AnswerPlan:
    """Return the texts that a body asks for.

    Raises:
        ApiError, Exl2FlowError: a field is wrong, or there is no room.
    """
    reader, warnings = reader_of(engine), list[str]()
    tools = _tools(body)
    fmt = engine.tool_format if tools.offered else None
    ids, opened, budget = _prompt(body, engine, tools, warnings)
    marks = marks_of(reader, opened=opened)
    inner = filter_of(body, engine)
    is_forced = fmt is not None and engine.has_grammars
    if is_forced:
        if inner is not None:
            warnings.append("with tools, the answer beside calls is not held to a schema")
        inner = _calls_only(body, engine, tools, warnings)
    fields = common(body, engine, own=reader.stops)
    fields["decode_special"] |= fmt is not None or reader.hides_marks
    fields["filters"] = _phases(marks, inner, opened=opened, budget=budget)
    prompt: Any = ids
    if body.cfg_scale is not None:
        negative = [{"role": "user", "content": body.negative_prompt or ""}]
        prompt = (tuple(ids), tuple(reader.prompt(negative)[0]))
    seed, most = seed_of(body), room_for(body, engine, ids)
    requests = tuple(
        Request(
            prompt,
            max_new_tokens=most,
            seed=seed + index,
            end_loops=body.end_loops is not False,
            probabilities=body.logprobs,
            top_tokens=body.top_logprobs if body.logprobs else 0,
            tag=index,
            **fields,
        )
        for index in range(body.n)
    )
    is_inline = body.reasoning_format == "none" or engine.options.reasoning_field == "inline"
    is_inline |= _goes_on(body)  # behind its thoughts, if any
    return AnswerPlan(
        requests=requests,
        prompts=(tuple(ids),),
        n=body.n,
        seed=seed,
        marks=None if is_inline else marks,
        opened=opened,
        tools=tuple(tools.offered),
        tool_format=fmt,
        is_forced=is_forced,
        warnings=tuple(warnings),
    )


def _prompt(
    body: ChatBody, engine: Engine, tools: "Tools", warnings: list[str]
) -> tuple[list[int], bool, int | None]:
    """Return the ids of a conversation, whether thoughts are begun, and their budget."""
    reader, messages = reader_of(engine), messages_of(body.messages)
    is_shown = bool(tools.offered) and not engine.tool_format.is_generic
    if tools.offered and not is_shown:
        if engine.options.strict:
            raise ApiError(400, "the model's template shows no `tools`", param="tools")
        warnings.append("the template shows no tools; they are in the system prompt")
        shown = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools.offered)
        messages = with_system(messages, GENERIC.format(tools=shown))
    variables, budget = _thinking(body, reader, warnings)
    ids, opened = reader.prompt(
        messages,
        tools=tools.offered if is_shown else None,
        variables=variables,
        goes_on=_goes_on(body),
        trusts=engine.options.trust_marks,
    )
    return ids, opened, budget


def _calls_only(body: ChatBody, engine: Engine, tools: "Tools", warnings: list[str]) -> Filter:
    """Return the filter that lets calls be valid only, compiled elsewhere first."""
    given = tool_grammar(
        engine.tool_format,
        tools.offered,
        engine.tokenizer,
        choice=tools.choice,
        name=tools.name,
        parallel=body.parallel_tool_calls,
    )
    engine.trial.check(given.filter)
    warnings += given.warnings
    return given.filter


def marks_of(reader: Reader, *, opened: bool) -> Thinking | None:
    """Return the marks of thoughts, if the model knows them."""
    marks, template = reader.format.thinking, reader.format.template
    if marks is None or not (opened or marks.open in template or marks.close in template):
        return None
    return marks


def _phases(
    marks: Thinking | None, inner: Filter | None, *, opened: bool, budget: int | None
) -> list[Filter]:
    if marks is not None and (inner is not None or budget is not None):
        return [Phases(marks, opened=opened, budget=budget, then=inner)]
    return [] if inner is None else [inner]


def _thinking(
    body: ChatBody, reader: Reader, warnings: list[str]
) -> tuple[dict[str, Any], int | None]:
    """Return the template's variables, and the budget of thoughts."""
    given = {**body.reasoning, **body.thinking}
    effort = body.reasoning_effort or given.get("effort")
    budget = body.thinking_budget
    for key in ("budget_tokens", "max_tokens"):
        budget = given.get(key) if budget is None else budget
    enabled = body.enable_thinking
    if enabled is None and "enabled" in given:
        enabled = bool(given["enabled"])
    if enabled is None and given.get("type") in ("enabled", "disabled"):
        enabled = given["type"] == "enabled"
    if effort == "none":
        effort, enabled = None, False
    wanted = {"enable_thinking": enabled, "reasoning_effort": effort, "documents": body.documents}
    variables = {k: v for k, v in wanted.items() if v is not None} | body.chat_template_kwargs
    for name in sorted(variables.keys() - reader.template.mentioned):
        warnings.append(f"the template does not mention {name}")
    if budget is not None and not isinstance(budget, int):
        raise ConfigError(f"`thinking_budget` is {budget!r:.40}; it must be an integer")
    return variables, None if budget == -1 else budget


def _goes_on(body: ChatBody) -> bool:
    last = body.messages[-1]
    return last.get("role") == "assistant" and (
        body.continue_final_message or not body.add_generation_prompt or bool(last.get("prefix"))
    )


class Tools(NamedTuple):
    """The functions that a model may call, and which it must."""

    offered: list[dict[str, Any]]
    choice: Choice
    name: str = ""


def _tools(body: ChatBody) -> Tools:
    tools = body.tools or [{"type": "function", "function": f} for f in body.functions]
    choice = body.tool_choice
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise ConfigError(f"`tool_choice` is {choice!r:.40}; it takes {', '.join(CHOICES)}")
        if CHOICES[choice] == "required" and not tools:
            raise ConfigError("`tool_choice` needs `tools`")
        return Tools([] if choice == "none" else tools, CHOICES[choice])
    inner = choice.get("function", choice)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise ConfigError("`tool_choice` has no `function` with a `name`")
    return Tools(tools, "named", name)


def messages_of(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates read them: text only, neighbours of one role joined.

    Raises:
        ApiError: a message has no role, or a part that is no text.
    """
    messages = list[dict[str, Any]]()
    for number, message in enumerate(given):
        role = message.get("role")
        if not isinstance(role, str):
            raise ApiError(400, f"`messages` [{number}] has no `role`", param="messages")
        role = "system" if role == "developer" else role
        values = {k: v for k, v in message.items() if k not in ("prefix", "refusal")}
        content = _text(message.get("content"), number)
        values |= {"role": role, "content": content}
        if thoughts := message.get("reasoning_content") or message.get("reasoning"):
            values["reasoning_content"] = thoughts
        last = messages[-1] if messages else {}
        is_plain = not any({"tool_calls", "reasoning_content"} & m.keys() for m in (last, values))
        if last.get("role") == role and role in ("system", "user", "assistant") and is_plain:
            last["content"] = f"{last['content']}\n\n{content}"
        else:
            messages.append(values)
    return messages


def _text(content: object, number: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(400, f"`content` of `messages` [{number}] is no text", param="messages")
    texts = list[str]()
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part if isinstance(part, str) else None
        if isinstance(part, Mapping) and kind in TEXT_PARTS:
            text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise ApiError(
                400,
                f"`messages` [{number}] has a part of type {kind!r:.40}; only text is read",
                code="unsupported_content",
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def with_system(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return messages with a text at the end of the system prompt."""
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def counted(messages: Sequence[Mapping[str, Any]], engine: Engine) -> list[int]:
    """Return the ids of a conversation; raises what `plan_of` raises."""
    try:
        return reader_of(engine).prompt(messages_of(messages))[0]
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages") from error
