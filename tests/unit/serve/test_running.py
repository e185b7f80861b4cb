"""Keys, strictness, and the end of a server."""

import json
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest
from servers import wait_for
from serving import Served, serving

KEY = "a-key-of-ours"
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = ("--strict", "--strict-names", "--waiting", "0", "--slots", "1", "--drain", "1")
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
    """The last test: running answers have a second, others are refused, the program ends with 0."""
    body = {"prompt": "The", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    lines = list[str]()

    def read() -> None:
        with (
            served.http(headers=HEADERS) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines.extend(line for line in answer.iter_lines() if line)

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: served.status(**HEADERS)["running"] == 1, pause=0.01)
    busy = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}, headers=HEADERS)
    served.process.send_signal(signal.SIGTERM)
    wait_for(lambda: httpx.get(f"{served.url}/health").status_code == 503, pause=0.01)
    refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}, headers=HEADERS)
    reader.join()

    assert busy.status_code == 429
    assert refused.status_code == 503
    assert int(busy.headers["retry-after"]) > 0 < int(refused.headers["retry-after"])
    assert served.process.wait(30) == 0
    assert len(lines) > 2
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "unavailable_error"
