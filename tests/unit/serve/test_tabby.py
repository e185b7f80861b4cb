"""SillyTavern's requests to a TabbyAPI and a llama.cpp server get what its source reads."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import wait_for
from serving import Served, serving

FOLDER = Path(__file__).parents[2] / "golden" / "serve" / "sillytavern"
SENT = {
    f"{path.stem}-{request['name']}": request
    for path in sorted(FOLDER.glob("*.json"))
    for request in json.loads(path.read_text(encoding="utf-8"))["requests"]
}
TEXTS = [name for name in SENT if "-text" in name]
KNOWN = {
    "banned_strings",
    "custom_token_bans",
    "dynatemp_high",
    "grammar",
    "json_schema",
    "logit_bias",
}
KNOWN |= {"rep_pen_range", "repetition_decay", "skew", "tfs", "top_a", "typical", "xtc_probability"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    env = {"EXL2FLOW_API_KEY": "KEY"}
    with serving(
        "--format", "chatml", "--max-answer", "24", "--cache-ram", "100MB", env=env
    ) as server:
        yield server


def send(served: Served, name: str, **more: Any) -> httpx.Response:
    """Send a request with its own headers, in its own order."""
    sent = SENT[name]
    body = {**sent["body"], **more} if "body" in sent else None
    content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
    with served.http(headers={}) as client:
        answer = client.request(
            sent["method"], sent["path"], content=content, headers=sent["headers"]
        )
    assert answer.status_code == 200, answer.text
    return answer


def events(answer: httpx.Response) -> list[Any]:
    """Return the events of a stream, as SillyTavern reads them."""
    lines = [line for line in answer.text.split("\n\n") if line and not line.startswith(":")]
    values = [line.removeprefix("data: ") for line in lines]
    return [json.loads(value) for value in values if value != "[DONE]"]


def shown(answer: httpx.Response, name: str) -> list[str]:
    """Return the texts of an answer, one for each swipe."""
    texts = dict[int, str]()
    if SENT[name]["body"]["stream"]:
        for event in events(answer):
            at = event["choices"][0]["index"] if "choices" in event else event["index"]
            new = event["choices"][0]["text"] if "choices" in event else event["content"]
            texts[at] = texts.get(at, "") + new
        return [text for _, text in sorted(texts.items())]
    value = answer.json()
    if "llamacpp" in name:
        return [row["content"] for row in (value if isinstance(value, list) else [value])]
    return [choice["text"] for choice in value["choices"]]


@pytest.mark.parametrize("name", TEXTS)
def test_texts_come_in_the_form_that_is_read(served: Served, name: str) -> None:
    answer, body = send(served, name), SENT[name]["body"]

    texts = shown(answer, name)

    assert len(texts) == body["n"]
    assert all(texts)
    assert not any(stop in text for text in texts for stop in body["stop"])
    assert KNOWN.isdisjoint(answer.headers["x-exl2flow-ignored"].split(", "))


def test_it_connects_and_finds_the_model_its_template_and_context(served: Served) -> None:
    for kind in ("tabby", "llamacpp"):
        assert [row["id"] for row in send(served, f"{kind}-list").json()["data"]] == ["model"]
    model, props = send(served, "tabby-model").json(), send(served, "llamacpp-props").json()

    assert (model["id"], model["parameters"]["max_seq_len"]) == ("model", 2048)
    assert "<|im_start|>" in props["chat_template"]
    assert props["default_generation_settings"]["n_ctx"] == 2048


def test_tokens_are_counted_alike_and_without_bos(served: Served) -> None:
    tabby, llama = (send(served, f"{kind}-count").json() for kind in ("tabby", "llamacpp"))
    text = SENT["tabby-count"]["body"]["text"]
    headers = SENT["tabby-count"]["headers"]

    assert tabby["tokens"] == llama["tokens"]
    assert tabby["length"] == len(tabby["tokens"]) > 0
    with served.http(headers=headers) as client:
        asked = {"tokens": tabby["tokens"]}
        assert client.post("/v1/token/decode", json=asked).json() == {"text": text}
        assert client.post("/detokenize", json=asked).json()["content"] == text
        turns = {"text": [{"role": "user", "content": text}]}
        longer = client.post("/v1/token/encode", json=turns).json()
    assert longer["length"] > tabby["length"] + 2


@pytest.mark.parametrize("kind", ["tabby", "llamacpp"])
def test_each_token_of_a_stream_has_its_probabilities(served: Served, kind: str) -> None:
    """SillyTavern shows the new text of an event, and the first entry of its candidates.

    Several tokens come in one event only if they could have begun a stop.
    """
    alone = 0
    for event in events(send(served, f"{kind}-text-probabilities-stream")):
        if kind == "tabby":
            [choice] = event["choices"]
            logs = choice["logprobs"] or {"tokens": [], "top_logprobs": []}
            text, tokens, best = choice["text"], logs["tokens"], logs["top_logprobs"]
        else:
            rows = event.get("completion_probabilities", [])
            text, tokens = event["content"], [row["content"] for row in rows]
            best = [{b["token"]: b["logprob"] for b in row["top_logprobs"]} for row in rows]
        assert "".join(tokens) == text
        assert len(tokens) < 2 or tokens[0].startswith("\n")
        alone += len(tokens) == 1
        for token, candidates in zip(tokens, best, strict=True):
            assert 0 < len(candidates) <= 10
            assert token in candidates or min(candidates.values()) > -10
            assert all(log <= 0 for log in candidates.values())

    assert alone > 5


def test_a_whole_answer_has_the_probabilities_of_its_tokens(served: Served) -> None:
    rows = send(served, "llamacpp-text-all-samplers").json()

    for row in rows:
        assert "".join(entry["content"] for entry in row["completion_probabilities"]) in (
            row["content"],
            row["content"] + row["stopping_word"],
        )


def test_the_end_of_a_text_tells_why_and_how_long(served: Served) -> None:
    last = events(send(served, "llamacpp-text-stream"))[-1]
    word = send(served, "llamacpp-text", stop=["e"]).json()

    assert (last["stop"], last["stop_type"], last["content"]) == (True, "limit", "")
    assert last["tokens_predicted"] == last["timings"]["predicted_n"] == 24
    assert last["tokens_evaluated"] > 50
    assert (word["stop_type"], word["stopping_word"]) == ("word", "e")


@pytest.mark.parametrize("kind", ["tabby", "llamacpp"])
def test_schemas_hold(served: Served, kind: str) -> None:
    name = f"{kind}-text-schema"

    [text] = shown(send(served, name, stop=[]), name)

    assert [*json.loads(text)] == ["mood"]


def test_grammars_hold(served: Served) -> None:
    name = "llamacpp-text-grammar"

    assert shown(send(served, name), name)[0] in ("storm", "harbour")


def test_biases_and_bans_of_llama_exclude_tokens(served: Served) -> None:
    """`false` bans, as -100 does in other forms."""
    plain = {"logit_bias": [], "temperature": 0, "n_predict": 1, "n_probs": 1, "logprobs": 1}
    plain |= dict.fromkeys(("max_tokens", "max_new_tokens", "num_predict"), 1)
    first = send(served, "llamacpp-text", **plain).json()
    headers, text = SENT["tabby-count"]["headers"], first["content"]
    with served.http(headers=headers) as client:
        asked = {"text": text, "add_bos_token": False}
        ids = client.post("/v1/token/encode", json=asked).json()["tokens"]

    banned = send(served, "llamacpp-text", **{**plain, "logit_bias": [[i, False] for i in ids]})

    assert banned.json()["content"] != text
    with served.http(headers=headers) as client:
        body = {"prompt": "a", "logit_bias": [[1]]}
        assert client.post("/completion", json=body).status_code == 400


def test_hits_are_told_by_tier(served: Served) -> None:
    """The cache has 8 pages; what salts keep apart drives each other out, to host memory."""
    headers = {"authorization": "Bearer KEY"}
    before, prompt = served.status(**headers)["cache"]["hits"], [5, 6] * 640
    with served.http(headers=headers) as client:
        for salt in "aabca":
            body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
            assert client.post("/v1/completions", json=body).status_code == 200
        wait_for(lambda: served.status(**headers)["running"] == 0, pause=0.01)
        cache, lines = served.status(**headers)["cache"], client.get("/metrics").text.splitlines()

    hits = {tier: cache["hits"][tier] - before[tier] for tier in before}
    assert hits == {"gpu": 1279, "ram": 1024, "disk": 0}
    assert cache["free_pages"] == 8
    assert cache["ram_bytes"] > 0 == cache["disk_bytes"]
    for tier, tokens in cache["hits"].items():
        [line] = [x for x in lines if f'_hits_total{{model_name="model",tier="{tier}"' in x]
        assert float(line.split()[-1]) == tokens
