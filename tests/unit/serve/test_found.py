"""What clients, schemathesis and lm-eval found: each request gets the answer that it asks for."""

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
from servers import wait_for
from serving import Served, serving

HI = [{"role": "user", "content": "What is a cat?"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("--format", "chatml", "--max-answer", "8") as server:
        yield server


@pytest.mark.parametrize(
    "more",
    [
        {"allowed_tokens": []},
        {"allowed_tokens": [-1]},
        {"banned_tokens": [10**25]},
        {"structured_outputs": {"choice": 3}},
        {"prompt": [5, -22097025], "token_healing": True},
    ],
    ids=lambda more: "-".join(more),
)
def test_values_out_of_range_are_refused(served: Served, more: Any) -> None:
    assert served.post(COMPLETIONS, {"prompt": "a", **more}).status_code == 400


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/messages", "/v1/responses"])
def test_a_body_of_very_many_levels_is_refused(served: Served, path: str) -> None:
    with served.http() as client:
        answer = client.post(
            path,
            content=b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
            headers={"content-type": "application/json"},
        )

    assert answer.status_code == 400, answer.text


def test_a_field_whose_name_fits_in_no_header_is_ignored(served: Served) -> None:
    assert served.post(COMPLETIONS, {"prompt": "a", " ": 1}).status_code == 200


def test_a_named_choice_needs_tools(served: Served) -> None:
    choice = {"type": "function", "function": {"name": "f"}}

    answer = served.post(CHAT, {"messages": HI, "tool_choice": choice})

    assert answer.status_code == 400


def test_the_token_that_stops_has_its_log_probability(served: Served) -> None:
    """lm-eval leaves the last entry out, whatever it is; without it, a token of the text."""
    body = {"prompt": [0, 306, 1801], "echo": True, "logprobs": 1, "max_tokens": 1}

    [choice] = served.post(COMPLETIONS, {**body, "logit_bias": {"1": 100}}).json()["choices"]

    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == 4


def test_names_of_special_tokens_have_their_ids(served: Served) -> None:
    """lm-eval finds BOS and EOS so."""
    with served.http() as client:
        name = client.get("/tokenizer_info").json()["eos_token"]

    body = {"prompt": name, "add_special_tokens": False}
    assert served.post("/tokenize", body).json()["tokens"] == [1]


def test_breakers_may_be_a_list_in_a_text(served: Served) -> None:
    """SillyTavern sends them so; at a breaker, a repetition ends that DRY would punish."""
    [dog] = served.post("/tokenize", {"prompt": " dog", "add_special_tokens": False}).json()[
        "tokens"
    ]
    body = {"prompt": "cat dog cat dog cat", "temperature": 0, "max_tokens": 1}
    body |= {"dry_multiplier": 100, "dry_allowed_length": 1, "logit_bias": {str(dog): 50}}
    broken, as_text, unbroken = (
        served.post(COMPLETIONS, {**body, "dry_sequence_breakers": breakers}).json()["choices"]
        for breakers in (["cat"], '["cat"]', [])
    )

    assert broken[0]["text"] != unbroken[0]["text"]
    assert as_text[0]["text"] == broken[0]["text"]


def test_guidance_of_one_takes_no_second_prompt(served: Served) -> None:
    """SillyTavern sends it with every request."""
    body = {"prompt": "a", "max_tokens": 1, "guidance_scale": 1, "negative_prompt": ""}
    with served.http() as client:

        def queries() -> float:
            name = "exl2flow_prefix_cache_queries_total{"
            [line] = [x for x in client.get("/metrics").text.splitlines() if x.startswith(name)]
            return float(line.split()[-1])

        before = queries()
        client.post(COMPLETIONS, json=body)
        wait_for(lambda: queries() == before + 2, pause=0.01)  # BOS and `a`
        assert queries() == before + 2


def test_answers_on_a_connection_in_use_do_not_wait_for_acknowledgements(served: Served) -> None:
    """Nagle's algorithm and delayed acknowledgements would add 40 ms to each."""
    times = list[float]()
    with served.http() as client:
        for _ in range(30):
            begun = time.perf_counter()
            client.get("/v1/models")
            times.append(time.perf_counter() - begun)

    assert median(times) < 0.02
