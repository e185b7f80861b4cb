"""One server with the demo model, through the wire, with the official client and without."""

import asyncio
import json
import math
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
import torch
from pydantic import BaseModel
from servers import wait_for
from serving import DEMO, Served, serving

from exl2flow.inference import Generator, SamplingSettings, load_model
from exl2flow.inference.scoring.evaluate import evaluate

HI: Any = [{"role": "user", "content": "What is a cat?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 10}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SLOW_GRAMMAR = r"start: T%%T: /(.|\n)*a(.|\n){20}/ & ~/(.|\n)*b(.|\n){21}/ & ~/(.|\n)*c(.|\n){22}/"
JSON = {"content-type": "application/json"}
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def nested(depth: int) -> Any:
    """Return lists within each other."""
    return json.loads("[" * depth + "]" * depth)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("--format", "chatml", "--slots", "4", "--tokens", "8192") as server:
        yield server


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Return an error, which has OpenAI's form."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    return error


def test_same_seed_gives_the_text_of_the_generator_alone_and_in_company(served: Served) -> None:
    model = load_model(DEMO, device="cpu")
    settings = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0)
    prompts = [f"The cat number {n}" for n in range(8)]
    expected = [
        Generator(model, slots=1).generate(prompt, seed=7, max_new_tokens=12, settings=settings)
        for prompt in prompts
    ]

    with served.openai() as client:
        alone = client.completions.create(model="m", prompt=prompts[0], seed=7, max_tokens=12)

    assert alone.choices[0].text == expected[0]
    assert asyncio.run(served.texts(prompts, seed=7, max_tokens=12)) == expected


@pytest.mark.parametrize("n", [1, 3])
def test_streams_join_to_the_plain_answer(served: Served, n: int) -> None:
    options: Any = {"model": "m", "messages": HI, "max_tokens": 30, "seed": 5, "n": n}
    with served.openai() as client:
        plain = client.chat.completions.create(**options)
        stream = client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
        texts, usage = [""] * n, None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""

    assert texts == [choice.message.content for choice in plain.choices]
    assert plain.usage is not None
    assert usage is not None
    assert usage.completion_tokens == plain.usage.completion_tokens
    assert len(set(texts)) == n


def test_calls_are_forced_and_streamed(served: Served) -> None:
    options: Any = {
        "model": "m",
        "messages": HI,
        "max_tokens": 200,
        "seed": 3,
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    with served.openai() as client:
        plain = client.chat.completions.with_raw_response.create(**options)
        pieces, names = "", list[str | None]()
        for chunk in client.chat.completions.create(**options, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.function is not None
                pieces += call.function.arguments or ""
                names += [call.function.name] if call.function.name else []
    choice = plain.parse().choices[0]

    assert "template shows no tools" in plain.headers["x-exl2flow-warnings"]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert names == [call.function.name] == ["get_weather"]
    assert pieces == call.function.arguments
    assert len(json.loads(pieces)["city"]) <= 10


class Pet(BaseModel):
    """What an answer must be."""

    legs: int
    is_tame: bool


def test_answers_match_a_schema(served: Served) -> None:
    with served.openai() as client:
        answer = client.chat.completions.parse(
            model="m", messages=HI, max_tokens=100, seed=1, response_format=Pet
        )

    assert isinstance(answer.choices[0].message.parsed, Pet)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_choice", ["yes", "no", "no way"]),
        ("structured_outputs", {"choice": ["yes", "no", "no way"]}),
        ("grammar", 'root ::= "yes" | "no" " way"?'),
        ("guided_regex", "yes|no( way)?"),
        ("response_format", {"type": "regex", "pattern": "yes|no( way)?"}),
    ],
)
def test_answers_match_constraints_of_all_names(served: Served, field: str, value: Any) -> None:
    answer = served.post("/v1/completions", {"prompt": "a", field: value}).json()

    assert answer["choices"][0]["text"] in ("yes", "no", "no way")
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_with_tools_a_schema_holds_for_texts_without_calls(served: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": Pet.model_json_schema()}}
    body = {"messages": HI, "max_tokens": 200, "tools": [WEATHER], "response_format": schema}
    for seed in range(3):
        answer = served.post("/v1/chat/completions", {**body, "seed": seed}).json()
        message = answer["choices"][0]["message"]
        if calls := message.get("tool_calls"):
            assert all(json.loads(c["function"]["arguments"])["city"] for c in calls)
        else:
            Pet.model_validate_json(message["content"])


def test_a_call_that_is_cut_stays_text_with_a_warning(served: Served) -> None:
    body = {"messages": HI, "max_tokens": 9, "tools": [WEATHER], "tool_choice": "required"}
    answer = served.post("/v1/chat/completions", body)
    streamed = served.post("/v1/chat/completions", {**body, "stream": True, "seed": 1}).text

    [choice] = answer.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith("<tool_call>")
    assert "does not parse" in answer.headers["x-exl2flow-warnings"]
    assert "<tool_call>" in streamed


@pytest.mark.slow  # as long as a grammar is tried
def test_a_grammar_that_hangs_holds_no_others_up(served: Served) -> None:
    body = {"prompt": "a", "grammar": SLOW_GRAMMAR.replace("%%", "\n")}
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(served.post, "/v1/completions", body) for _ in range(6)]
        for _ in range(3):
            plain = served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
            assert plain.status_code == 200
        assert not any(one.done() for one in asked)
        answers = [one.result() for one in asked]

    assert [one.status_code for one in answers] == [400] * 6
    assert all("more than 5 s" in one.json()["error"]["message"] for one in answers)


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_end_has_a_status_before_text_and_an_event_behind(
    served: Served, stream: bool
) -> None:
    body = {"prompt": "a", "regex_pattern": "cat", "stream": stream}
    before = served.post("/v1/completions", {**body, "banned_strings": ["c"]})
    behind = served.post("/v1/completions", {**body, "banned_strings": ["t"]})

    assert refused(before, 400)["code"] == "filter_dead_end"
    if stream:
        assert behind.status_code == 200
        last = behind.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "filter_dead_end"
    else:
        assert refused(behind, 400)["code"] == "filter_dead_end"


def test_a_salt_keeps_pages_apart(served: Served) -> None:
    ids = [*range(100, 400)]

    def cached(**salt: str) -> int:
        body = {"prompt": ids, "max_tokens": 1, **salt}
        usage = served.post("/v1/completions", body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    salts: list[dict[str, str]] = [{}, {}, {"cache_salt": "x"}, {"cache_salt": "x"}]
    assert [cached(**salt) > 0 for salt in salts] == [False, True, False, True]


def test_scores_are_those_of_evaluate(served: Served) -> None:
    ids = [0, *range(300, 360)]
    body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}

    [choice] = served.post("/v1/completions", body).json()["choices"]
    logs = choice["logprobs"]["token_logprobs"][1:]
    [score] = evaluate([DEMO], torch.tensor([ids]))

    assert score.tokens == len(logs)
    assert abs(sum(logs) / len(logs) + math.log(score.perplexity)) < 1e-3


def test_echo_gives_the_scores_of_prompts(served: Served) -> None:
    body = {"prompt": [[0, 306, 1801], "The cat"], "echo": True, "logprobs": 1, "max_tokens": 1}

    first, second = served.post("/v1/completions", body).json()["choices"]

    logs = first["logprobs"]
    assert logs["tokens"][:3] == ["<|bos|>", "The", " cat"]
    assert logs["token_logprobs"][0] is None
    assert all(-20 < log < 0 for log in logs["token_logprobs"][1:])
    assert logs["token_logprobs"][:3] == second["logprobs"]["token_logprobs"][:3]
    assert max(logs["top_logprobs"][1].values()) >= logs["token_logprobs"][1]
    assert logs["text_offset"][:3] == [0, 7, 10]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat/completions", {"messages": HI, "temperature": -1}, 400, "`temperature`"),
        ("chat/completions", {"messages": HI, "temperature": "hot"}, 400, "`temperature`"),
        ("chat/completions", {"messages": []}, 400, "`messages`"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "`role`"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "image_url",
        ),
        ("chat/completions", {"messages": HI, "chat_template": "x"}, 400, "`chat_template`"),
        ("chat/completions", {"messages": HI, "tool_choice": "required"}, 400, "`tools`"),
        ("completions", {"prompt": [5] * 3000}, 400, "3000 tokens"),
        ("completions", {"prompt": [5, 999_999]}, 400, "id 999999"),
        ("completions", {"prompt": "a", "suffix": "b"}, 400, "`suffix`"),
        ("completions", {"prompt": "a", "json_schema": {}, "regex_pattern": "a"}, 400, "two"),
        ("completions", {"prompt": "a", "x": nested(64)}, 400, "64 levels"),
        ("completions", {"prompt": "a", "lora": [{"name": "x"}]}, 400, "`lora`"),
        ("completions", {"prompt": "a", "guided_choice": []}, 400, "`choice`"),
        ("completions", {"prompt": "a", "n_predict": 1, "max_tokens": 2}, 400, "`max_tokens`"),
        ("completions", {"prompt": "\ud800"}, 400, "surrogate"),
        ("embeddings", {"input": "a"}, 501, "/v1/embeddings"),
    ],
)
def test_bad_requests_are_refused_by_name(
    served: Served, path: str, body: Any, status: int, words: str
) -> None:
    with served.http() as client:
        answer = client.post(f"/v1/{path}", content=json.dumps(body).encode(), headers=JSON)

    error = refused(answer, status)
    assert words in error["message"]
    assert (error["code"] == "context_length_exceeded") == ("3000 tokens" in words)


def test_unknown_fields_are_named(served: Served) -> None:
    answer = served.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "foo": 1, "user": ""})

    assert answer.status_code == 200
    assert answer.headers["x-exl2flow-ignored"] == "foo"
    assert int(answer.headers["x-exl2flow-seed"]) >= 0


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"content": b"{", "headers": JSON}, 400),
        ({"content": b"[" * 100_000, "headers": JSON}, 400),
        ({"content": b"x" * (40 << 20), "headers": JSON}, 413),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 415),
        ({"json": {}, "headers": {"origin": "http://evil.example"}}, 403),
        ({"json": {}, "headers": {"host": "evil.example"}}, 403),
        ({"json": {}, "headers": {"x-large": "x" * (33 << 10)}}, 431),
    ],
)
def test_strange_requests_are_refused(served: Served, options: Any, status: int) -> None:
    with served.http() as client:
        refused(client.post("/v1/completions", **options), status)


def test_bodies_in_chunks_are_counted(served: Served) -> None:
    """Far more is sent than sockets hold: a client that still sends sees why it is refused."""
    chunks = (b" " * (1 << 20) for _ in range(40))
    with served.http() as client:
        refused(client.post("/v1/completions", content=chunks, headers=JSON), 413)


@pytest.mark.slow  # as long as slow clients are borne
@pytest.mark.parametrize(
    ("words", "seconds", "status"), [("", 10, b""), ("content-length: 9\r\n\r\n{", 30, b"408")]
)
def test_slow_clients_are_dropped(
    served: Served, words: str, seconds: float, status: bytes
) -> None:
    began, answer = time.monotonic(), b""
    with sent(served, HEAD + words) as connection, suppress(ConnectionResetError):
        while piece := connection.recv(4096):
            answer += piece

    assert answer.split(b" ")[1:2] == ([status] if status else [])
    assert seconds - 1 < time.monotonic() - began < seconds + 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_texts(served: Served, stream: bool) -> None:
    body = {"prompt": "The", "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    before = sum(" 499" in line for line in served.lines)
    with left(served, body):
        wait_for(lambda: served.status()["running"] == 1, pause=0.01)
        wait_for(lambda: served.status()["kv_cache_usage"] > 0, pause=0.01)
    wait_for(lambda: served.status()["running"] == 0, pause=0.01)
    wait_for(lambda: served.status()["kv_cache_usage"] == 0, pause=0.01)
    wait_for(lambda: sum(" 499" in line for line in served.lines) == before + 1)

    line = [line for line in served.lines if " 499" in line][-1]
    assert int(line.partition("new=")[2].split()[0]) < 1900  # it did not run to its end


def left(served: Served, body: Any) -> socket.socket:
    """Send a request, and return the connection, for the client to leave."""
    content = json.dumps(body)
    return sent(served, f"{HEAD}content-length: {len(content)}\r\n\r\n{content}")


def sent(served: Served, text: str = "") -> socket.socket:
    """Return a connection, on which a text was sent."""
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(text.encode())
    return connection


def test_clients_may_leave_in_the_queue_and_in_prefill(served: Served) -> None:
    text = {"prompt": "The", "max_tokens": 1900, "ignore_eos": True}
    with served.http() as client:
        running = [left(served, {**text, "seed": seed}) for seed in range(4)]
        wait_for(lambda: served.status()["running"] == 4, pause=0.01)
        queued = left(served, text)
        wait_for(lambda: served.status()["waiting"] == 1, pause=0.01)
        queued.close()
        wait_for(lambda: served.status()["waiting"] == 0, pause=0.01)
        assert served.status()["running"] == 4
        for connection in running:
            connection.close()
        wait_for(lambda: served.status()["kv_cache_usage"] == 0, pause=0.01)
        reading = left(served, {"prompt": [*range(50, 2000)], "max_tokens": 1})
        wait_for(lambda: served.status()["running"] == 1, pause=0.005)
        reading.close()
        wait_for(lambda: served.status()["kv_cache_usage"] == 0, pause=0.01)
        [line] = [
            row for row in client.get("/metrics").text.splitlines() if "disconnects_total{" in row
        ]
    assert float(line.split()[-1]) >= 5


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_idle_connections_make_room_for_others(served: Served) -> None:
    silent = [sent(served) for _ in range(300)]
    try:
        answer = served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        wait_for(lambda: sum(map(is_closed, silent)) > 40, pause=0.05)
    finally:
        for connection in silent:
            connection.close()

    assert answer.status_code == 200


def test_ids_and_texts_are_each_others_inverse(served: Served) -> None:
    ids = served.post("/tokenize", {"prompt": "A cat.", "add_special_tokens": False}).json()

    assert served.post("/detokenize", {"tokens": ids["tokens"]}).json()["prompt"] == "A cat."
    assert ids["count"] == len(ids["tokens"])


def test_the_server_describes_itself(served: Served) -> None:
    with served.http() as client:
        [model] = client.get("/v1/models").json()["data"]
        info = client.get("/tokenizer_info").json()
        metrics = client.get("/metrics").text
        document = client.get("/openapi.json").json()
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/v1/nothing").status_code == 404
        assert client.get("/v1/completions").status_code == 405

    assert model["id"] == "model"
    assert model["max_model_len"] == 2048
    assert info["bos_token"] == "<|bos|>"
    assert 'exl2flow_generation_tokens_total{model_name="model"}' in metrics
    assert 'path="/completions"' in metrics
    assert "/v1/chat/completions" in document["paths"]


def test_lines_of_the_log_have_no_texts(served: Served) -> None:
    before = len(served.lines)
    served.post("/v1/completions", {"prompt": "secret words", "max_tokens": 1})
    wait_for(lambda: len(served.lines) > before)  # it is written behind the answer

    line = [line for line in served.lines if "key=" in line][-1]
    assert "prompt=" in line
    assert "new=1" in line
    assert not any("secret" in line for line in served.lines)


def test_what_clients_open_is_closed(served: Served) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{served.process.pid}/fd"))

    served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    wait_for(lambda: served.status()["running"] == 0)
    before = descriptors()
    for _ in range(20):
        served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})

    wait_for(lambda: descriptors() <= before + 1)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", {"messages": HI, "stop_sequences": ["a"] * 65}, "stop_sequences"),
        ("/v1/completions", {"prompt": "a", "rep_pen": 0}, "rep_pen"),
        ("/v1/completions", {"prompt": "a", "rep_pen_range": -5}, "rep_pen_range"),
        ("/v1/completions", {"prompt": "a", "x": [{}] * 70_000}, None),
        ("/detokenize", {"tokens": [9] * 2049}, "tokens"),
        ("/v1/token/decode", {"tokens": [9] * 2049}, "tokens"),
        ("/tokenize", {"prompt": "ab " * 2049, "return_token_strs": True}, "return_token_strs"),
    ],
)
def test_what_is_too_much_is_refused_by_the_clients_name(
    served: Served, path: str, body: dict[str, Any], name: str | None
) -> None:
    error = refused(served.post(path, body), 400)

    assert error["param"] == name
    assert name is None or f"`{name}`" in error["message"]


def test_ids_beyond_a_prompt_are_counted(served: Served) -> None:
    answer = served.post("/tokenize", {"prompt": "ab " * 5000}).json()

    assert answer["count"] == len(answer["tokens"]) > 2048
    assert answer["token_strs"] is None
