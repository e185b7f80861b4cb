"""One server with keys, a page, an adapter, thoughts and a small cache, through the wire."""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from adapters import make_adapter
from serving import DEMO, Served, serving

from exl2flow.inference import Generator, SamplingSettings, load_model

PAGE = "http://page.example"
KEYS = """
[[key]]
name = "ann"
key = "first-key"

[[key]]
name = "ben"
sha256 = "{digest}"
"""
HEADERS = {"authorization": "Bearer first-key"}
NEUTRAL = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    keys = folder / "keys.toml"
    keys.write_text(KEYS.format(digest=hashlib.sha256(b"second-key").hexdigest()))
    keys.chmod(0o600)
    adapter = make_adapter(folder / "style", DEMO)
    flags = ("--keys", str(keys), "--origin", PAGE, "--lora", str(adapter), "--log-json")
    with serving(*flags, "--slots", "16", "--tokens", "1280", "--format", "qwq") as server:
        yield server


def test_same_seed_gives_the_text_of_the_generator_among_others_that_are_preempted(
    served: Served,
) -> None:
    """Two texts of two full pages fit in five, and each needs a third one at once."""
    generator, random = Generator(load_model(DEMO, device="cpu"), slots=1), Random(1)
    prompts = [[random.randrange(5, 4000) for _ in range(508)] for _ in range(8)]
    options: Any = {"max_tokens": 12, "seed": 7}
    expected = [
        text
        for prompt in prompts
        for text in generator.generate([prompt], max_new_tokens=12, seed=7, settings=NEUTRAL)
    ]

    body = {"prompt": prompts[3], "lora": [], **options}
    alone = served.post("/v1/completions", body, **HEADERS).json()["choices"][0]["text"]

    together = served.texts(prompts, "first-key", extra_body={"lora": []}, **options)
    assert asyncio.run(together) == expected
    assert alone == expected[3]
    assert served.status(**HEADERS)["preemptions"] > 0


def test_adapters_go_by_name_and_scale(served: Served) -> None:
    model = load_model(DEMO, device="cpu")

    def text(**fields: Any) -> str:
        body = {"prompt": "The cat", "max_tokens": 8, "temperature": 0, **fields}
        return str(served.post("/v1/completions", body, **HEADERS).json()["choices"][0]["text"])

    with served.http(headers=HEADERS) as client:
        names = [row["id"] for row in client.get("/v1/models").json()["data"]]
    plain = Generator(model, slots=1).generate(
        "The cat", max_new_tokens=8, settings=SamplingSettings(temperature=0.0)
    )

    assert names == ["model", "model:style"]
    assert text(lora=[]) == text(lora=[{"name": "style", "scale": 0}]) == plain
    assert text() == text(model="model:style") == text(model="style", lora=[{"name": "style"}])
    assert len({text(), plain, text(lora=[{"name": "style", "scale": 0.5}])}) == 3


def test_a_budget_ends_thoughts_and_a_schema_begins_behind_them(served: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is a cat?"}],
        "max_tokens": 100,
        "thinking_budget": 5,
        "regex_pattern": "(yes|no), [a-z]{3}",
        "seed": 2,
    }
    answer = served.post("/v1/chat/completions", body, **HEADERS).json()
    closed = served.post("/v1/chat/completions", {**body, "thinking_budget": 0}, **HEADERS).json()

    message = answer["choices"][0]["message"]
    assert message["content"].split(", ")[0] in ("yes", "no")
    assert len(message["content"].split(", ")[1]) == 3
    assert message["reasoning_content"]
    tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 5 <= tokens <= 5 + len("</think>")
    assert "reasoning_content" not in closed["choices"][0]["message"]


def test_pages_that_are_allowed_read_answers_and_errors(served: Served) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    with served.http() as client:
        asked = client.options("/v1/completions", headers={"origin": PAGE})
        told = client.post("/v1/completions", json=body, headers={**HEADERS, "origin": PAGE})
        wrong = client.post("/v1/completions", json=body, headers={"origin": PAGE})
        foreign = client.options("/v1/completions", headers={"origin": "http://evil.example"})

    assert [a.status_code for a in (asked, told, wrong, foreign)] == [204, 200, 401, 403]
    for answer in (asked, told, wrong):
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-origin" not in foreign.headers


def test_keys_of_a_file_have_names_in_the_log(served: Served) -> None:
    for key in ("first-key", "second-key"):
        body = {"prompt": "secret words", "max_tokens": 1, "user": "x", "foo": 1}
        headers = {"authorization": f"Bearer {key}"}
        assert served.post("/v1/completions", body, **headers).status_code == 200
    wrong = served.post("/v1/completions", {"prompt": "a"}, authorization="Bearer third-key")
    with served.http(headers=HEADERS) as client:
        metrics = client.get("/metrics").text

    found = [json.loads(line) for line in served.lines if line.startswith("{")]
    lines = [line for line in found if "new" in line]
    assert [line["status"] for line in found if "new" not in line][-1] == 401
    assert wrong.status_code == 401
    assert [line["key"] for line in lines[-2:]] == ["ann", "ben"]
    assert lines[-1]["status"] == 200
    assert lines[-1]["new"] == 1
    assert not any("secret" in line or "-key" in line for line in served.lines)
    for row in ('ignored_fields_total{field="user"', 'ignored_fields_total{field="other"'):
        assert f"exl2flow_{row}" in metrics
    assert "exl2flow_model_load_seconds{" in metrics
    assert "exl2flow_num_preemptions_total{" in metrics
