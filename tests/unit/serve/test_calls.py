"""Calls of each kind of format through the wire: valid, and the same when they are streamed."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import openai
import pytest
import uvicorn
from hosts import make_host, models_of
from serving import DEMO
from tool_calls import TOOLS

from exl2flow.engine.chat import all_tool_formats, choose_format
from exl2flow.inference import LoadedModel, load_model
from exl2flow.serve.http.app import create_app
from exl2flow.serve.http.running import Connection

OF_KIND = {row.kind: row.name for row in reversed(all_tool_formats().values())}
SEEDS = range(4)
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(DEMO, device="cpu")


@contextmanager
def served(model: LoadedModel, tool_format: str) -> Iterator[str]:
    """Serve a model in a thread, with one format of calls; yield the address."""
    fmt, _ = choose_format(DEMO, model.tokenizer, "chatml")
    host = make_host(model, fmt=fmt, slots=8, tool_format=tool_format, tool_grammar="on")
    host.start()
    app = create_app(models_of(host))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, http=Connection, ws="none", log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


async def calls_of(url: str, seed: int, *, stream: bool) -> list[tuple[str, str]]:
    """Return names and arguments of the calls of an answer."""
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
        options: Any = {
            "model": "m",
            "messages": [{"role": "user", "content": "What is the weather?"}],
            "max_tokens": 400,
            "seed": seed,
            "temperature": 2,  # as if the weights were random
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        if not stream:
            [choice] = (await client.chat.completions.create(**options)).choices
            assert choice.finish_reason == "tool_calls"
            calls = choice.message.tool_calls
            return [(call.function.name, call.function.arguments) for call in calls]
        names, pieces = dict[int, str](), dict[int, str]()
        async for chunk in await client.chat.completions.create(stream=True, **options):
            for call in chunk.choices[0].delta.tool_calls or ():
                names.setdefault(call.index, call.function.name)
                pieces[call.index] = pieces.get(call.index, "") + call.function.arguments
        return [(name, pieces[index]) for index, name in names.items()]


@pytest.mark.parametrize("kind", sorted(OF_KIND))
def test_calls_are_valid_and_the_same_in_pieces(model: LoadedModel, kind: str) -> None:
    async def answers(url: str) -> list[list[tuple[str, str]]]:
        asked = [
            calls_of(url, seed, stream=is_streamed) for seed in SEEDS for is_streamed in (0, 1)
        ]
        return await asyncio.gather(*asked)

    with served(model, OF_KIND[kind]) as url:
        found = asyncio.run(answers(url))

    assert found[::2] == found[1::2]
    for [(name, arguments)] in found:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
