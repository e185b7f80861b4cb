"""Requests as clients send them get answers that these clients can read.

The files have the fields, their order, sizes and headers of a package, which each names; all texts
are our own.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served, serving

FOLDER = Path(__file__).parents[2] / "golden" / "serve"
SENT = {
    f"{path.stem}-{request['name']}": request
    for path in sorted(FOLDER.glob("*.json"))
    for request in json.loads(path.read_text(encoding="utf-8"))["requests"]
}
ENDS = {"stop", "length", "tool_calls"}
KEY = "KEY"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    env = {"EXL2FLOW_API_KEY": KEY}
    with serving("--format", "chatml", "--max-answer", "40", env=env) as server:
        yield server


def send(served: Served, sent: dict[str, Any]) -> httpx.Response:
    """Send a request with its own headers, in its own order."""
    content = json.dumps(sent["body"], separators=(",", ":"), ensure_ascii=False).encode()
    with served.http(headers={}) as client:
        return client.post(sent["path"], content=content, headers=sent["headers"])


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which is complete."""
    lines = [line for line in answer.text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def read(answer: httpx.Response, sent: dict[str, Any]) -> tuple[str, list[str], str, Any]:
    """Return text, arguments of calls, end and usage as the client puts them together."""
    text, calls, end, usage = "", dict[int, str](), "", None
    is_streamed = sent["body"].get("stream", False)
    for chunk in chunks_of(answer) if is_streamed else [answer.json()]:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            said = choice.get("delta", choice.get("message", choice))
            text += said.get("content") or said.get("text") or ""
            for at, call in enumerate(said.get("tool_calls") or ()):
                number = call.get("index", at)
                calls[number] = calls.get(number, "") + call["function"]["arguments"]
            end = choice["finish_reason"] or end
    return text, [*calls.values()], end, usage


def test_the_files_name_their_packages() -> None:
    files = [json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")]

    assert len(files) == 5
    assert all(each["package"] and each["sources"] and each["requests"] for each in files)


@pytest.mark.parametrize("name", SENT)
def test_clients_get_answers(served: Served, name: str) -> None:
    sent = SENT[name]

    answer = send(served, sent)

    assert answer.status_code == 200, answer.text
    text, calls, end, usage = read(answer, sent)
    assert end in ENDS
    assert text or calls
    assert not any(stop in text for stop in sent["body"].get("stop", ()))
    assert all(isinstance(json.loads(call), dict) for call in calls if end == "tool_calls")
    streams = sent["body"].get("stream", False)
    wants = sent["body"].get("stream_options", {}).get("include_usage", not streams)
    assert (usage is not None) == wants
    if wants:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
def test_clients_find_the_model(served: Served, path: str) -> None:
    with served.http(headers={"authorization": f"Bearer {KEY}"}) as client:
        assert [row["id"] for row in client.get(path).json()["data"]] == ["model"]


def test_a_client_without_its_key_is_refused(served: Served) -> None:
    [sent] = [SENT["aider-edit"]]
    headers = {**sent["headers"], "authorization": "Bearer other"}

    assert send(served, {**sent, "headers": headers}).status_code == 401
