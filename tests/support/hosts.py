"""Hosts of models in this process, for tests of the server."""

from collections.abc import Callable, Mapping
from typing import Any

from exl2flow.core.options.serving import ServeOptions
from exl2flow.core.requests.conversation import PromptFormat
from exl2flow.core.requests.request import Request
from exl2flow.inference import Adapter, Generator, LoadedModel
from exl2flow.serve.answers.answer import AnswerPlan
from exl2flow.serve.hosts.model_host import ModelHost
from exl2flow.serve.hosts.models import Models


def make_host(
    model: LoadedModel,
    make: Callable[[], Generator] | None = None,
    *,
    fmt: PromptFormat | None = None,
    defaults: Mapping[str, Any] = {},
    adapters: tuple[Adapter, ...] = (),
    name: str | None = None,
    **options: Any,
) -> ModelHost:
    """Return a host; options: by default two slots, and no grammars for tools."""
    given = ServeOptions(**{"slots": 2, "tool_grammar": "off", **options})
    make = make or (lambda: Generator(model, slots=given.slots))
    known = {"fmt": fmt, "defaults": {**defaults}, "adapters": adapters, "name": name}
    return ModelHost(model, make, given, **known)


def models_of(host: ModelHost) -> Models:
    """Return the models of a server that has only this one."""
    return Models(host, lambda _: host)


def text_of(tokens: int, **fields: Any) -> AnswerPlan:
    """Return the plan of one text of some tokens."""
    request = Request([5], max_new_tokens=tokens, stops=(), tag=0, **fields)
    return AnswerPlan(requests=(request,), prompts=((5,),))


async def reason_of(host: ModelHost, plan: AnswerPlan) -> str | None:
    """Return why the text of a plan ended."""
    answer = await host.begin(lambda: plan)
    try:
        async for _ in answer.updates():
            pass
    finally:
        host.end(answer)
    return answer.ends[0].reason
