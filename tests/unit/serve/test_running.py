"""Keys, strictness, and the end of a server."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from hosts import make_host, models_of
from servers import PATIENCE_SECONDS, wait_for
from serving import Served, serving
from tiny import make_tiny

from exl2flow.inference import load_model
from exl2flow.serve.hosts.keys import Keys
from exl2flow.serve.http.app import create_app
from exl2flow.serve.http.running import _Server

KEY = "a-key-of-ours"
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = ("--strict", "--strict-names", "--waiting", "0", "--slots", "1", "--drain", "600")
    with serving(*flags, env={"EXL2FLOW_API_KEY": KEY}) as server:
        yield server


def test_a_key_is_needed_but_for_health(served: Served) -> None:
    with served.http() as client:
        assert client.get("/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": KEY + "x"}):
            answer = client.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
        assert client.get("/v1/models", headers={"x-api-key": KEY}).status_code == 200
        assert client.get("/v1/models", headers=HEADERS).status_code == 200
    assert not any(KEY in line for line in served.lines)


def test_strict_servers_refuse_unknown_fields_and_names(served: Served) -> None:
    with served.http(headers=HEADERS) as client:
        field = client.post("/v1/completions", json={"prompt": "a", "foo": 1})
        name = client.post("/v1/completions", json={"prompt": "a", "model": "other"})
        own = client.post("/v1/completions", json={"prompt": "a", "model": "model", "n_predict": 1})

    assert field.status_code == 400
    assert field.json()["error"]["param"] == "foo"
    assert name.status_code == 404
    assert name.json()["error"]["code"] == "model_not_found"
    assert own.status_code == 200


def test_a_model_without_a_template_refuses_chats_with_the_remedy(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    with served.http(headers=HEADERS) as client:
        answer = client.post("/v1/chat/completions", json=body)

    assert answer.status_code == 400
    assert "--format" in answer.json()["error"]["message"]


def test_a_signal_drains_the_server(served: Served) -> None:
    """The last test: a running answer goes on, others are refused, the program ends with 0."""
    body = {"prompt": "The", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with (
        served.http(headers=HEADERS) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = filter(None, answer.iter_lines())
        next(lines)
        busy = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}, headers=HEADERS)
        served.process.terminate()
        wait_for(lambda: httpx.get(f"{served.url}/health").status_code == 503, pause=0.01)
        refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}, headers=HEADERS)
        going_on = next(lines)
        assert served.process.is_alive()

    assert busy.status_code == 429
    assert refused.status_code == 503
    assert int(busy.headers["retry-after"]) > 0 < int(refused.headers["retry-after"])
    assert json.loads(going_on.removeprefix("data: "))["choices"]
    served.process.join(PATIENCE_SECONDS)
    assert served.process.exitcode == 0


def test_answers_that_run_at_the_end_of_the_drain_are_told(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, max_position_embeddings=8192)
    host = make_host(load_model(folder, device="cpu"), slots=1, drain=0)
    host.start()
    models = models_of(host)
    app = create_app(models, Keys())
    config = uvicorn.Config(app, lifespan="off")
    config.load()
    body = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "end_loops": False}

    async def run() -> tuple[httpx.Response, bool]:
        server = _Server(config, models, None)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            asked = asyncio.create_task(client.post("/v1/completions", json=body, timeout=None))
            while not host.answers:
                await asyncio.sleep(0.001)
            server.handle_exit(signal.SIGTERM, None)
            await server.on_tick(1)
            answer = await asked
        await models.close()
        return answer, server.should_exit

    answer, is_ended = asyncio.run(run())
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "unavailable_error"
    assert is_ended
