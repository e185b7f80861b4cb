"""Random valid bodies for each endpoint of `exl2flow serve`, and what an answer must look like."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

WORDS = "the ferry crosses a quiet river while Lily counts old brass lamps and asks who built them"
FINAL = ("response.completed", "response.incomplete", "response.failed")
MOST_TOKENS = 48  # of an answer
LONGEST_PROMPT = 400  # words
REFUSED = 0.05  # of the requests
LOADED = 0.01  # of the requests name the other model
Body = dict[str, Any]

SAMPLERS: dict[str, Callable[[random.Random], Any]] = {
    "temperature": lambda r: r.choice([0, 0.5, 1, 1.7]),
    "top_k": lambda r: r.choice([-1, 1, 20, 200]),
    "top_p": lambda r: r.uniform(0.1, 1),
    "min_p": lambda r: r.uniform(0, 0.3),
    "typical_p": lambda r: r.uniform(0.2, 1),
    "tfs": lambda r: r.uniform(0.5, 1),
    "top_a": lambda r: r.uniform(0, 0.5),
    "repetition_penalty": lambda r: r.uniform(1, 1.5),
    "frequency_penalty": lambda r: r.uniform(-1, 1),
    "presence_penalty": lambda r: r.uniform(-1, 1),
    "dry_multiplier": lambda r: r.uniform(0, 1),
    "xtc_probability": lambda r: r.uniform(0, 1),
    "mirostat": lambda r: r.choice([0, 2]),
    "logit_bias": lambda r: {str(r.randrange(5, 4000)): r.uniform(-100, 5)},
    "min_tokens": lambda r: r.randrange(4),
    "ignore_eos": lambda r: r.random() < 0.5,
    "seed": lambda r: r.randrange(1 << 31),
    "cache_salt": lambda r: r.choice(["", "one", "two"]),
    "banned_strings": lambda r: [r.choice(WORDS.split())],
    "stop": lambda r: r.sample(["\n", ".", " the", "e", "river"], r.randrange(1, 3)),
    "unknown_field": lambda r: r.random(),
}
DEAD = (
    "banned_strings",
    "logit_bias",
    "ignore_eos",
    "min_tokens",
    "stop",
)  # may leave nothing of a constraint
CONSTRAINTS: tuple[Body, ...] = (
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"json_schema": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3}},
    {"regex_pattern": "[a-z]{2,6} [0-9]{1,3}"},
    {"guided_choice": ["yes", "no", "perhaps"]},
    {"response_format": {"type": "json_object"}},
)
WRONG: tuple[Body, ...] = (
    {"temperature": -1},
    {"repetition_penalty": -1},
    {"top_p": "much"},
    {"min_tokens": -3},
    {"logit_bias": {"no id": 1}},
    {"regex_pattern": "(("},
    {"json_schema": {"type": "nothing"}},
    {"regex_pattern": "a", "guided_choice": ["b"]},
    {"stop_token_ids": ["x"]},
)
PARAMETERS = {"type": "object", "properties": {"day": {"enum": ["Monday", "Friday"]}}}
STATEMENT = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A request. is_wrong: it must be refused. leaves: seconds until its client leaves, if it does.

    texts: choices that it asks for. limit: most tokens of each.
    """

    path: str
    body: Body
    is_wrong: bool
    leaves: float | None
    texts: int = 1
    limit: int = 0

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes as events."""
        return bool(self.body.get("stream"))


def prose(rng: random.Random) -> str:
    """Return a prompt: every other one begins as many others do, so that the cache finds it."""
    own = random.Random(rng.randrange(6)) if rng.random() < 0.5 else rng
    count = own.randrange(1, LONGEST_PROMPT) if own.random() < 0.6 else own.randrange(1, 20)
    return " ".join(own.choices(WORDS.split(), k=count))


def drawn(rng: random.Random, *, model: str, other: str, leaves: bool) -> Drawn:
    """Draw a request to a model, now and then to the other one."""
    path = rng.choice([*ANSWERED, *ANSWERED, *COUNTED])
    body = {**BODIES[path](rng), "model": other if rng.random() < LOADED else model}
    if path in COUNTED:
        return Drawn(path=path, body=body, is_wrong=False, leaves=None)
    limit = rng.randrange(4, MOST_TOKENS + 1)
    body |= {ANSWERED[path]: limit, "stream": rng.random() < 0.5}
    constraint = rng.choice(CONSTRAINTS) if rng.random() < 0.15 and "tools" not in body else {}
    is_held = constraint or "tools" in body
    names = rng.sample([n for n in SAMPLERS if not (is_held and n in DEAD)], rng.randrange(6))
    body |= constraint | {name: SAMPLERS[name](rng) for name in names}
    is_wrong = rng.random() < REFUSED
    if is_wrong:
        body |= rng.choice(WRONG)
    seconds = rng.uniform(0, 3) * rng.random() if leaves and rng.random() < 0.5 else None
    texts = body.get("n", 1) * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
    return Drawn(path=path, body=body, is_wrong=is_wrong, leaves=seconds, texts=texts, limit=limit)


def _messages(rng: random.Random) -> list[Body]:
    first = {"role": "user", "content": prose(rng)}
    if rng.random() < 0.6:
        return [first]
    return [first, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]


def _chat(rng: random.Random) -> Body:
    body: Body = {"messages": _messages(rng), "stream_options": {"include_usage": True}}
    if rng.random() < 0.2:
        function = {"name": "book", "parameters": PARAMETERS}
        body["tools"] = [{"type": "function", "function": function}]
        body["tool_choice"] = rng.choice(["auto", "required", "none"])
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": rng.randrange(6)}
    if rng.random() < 0.2:
        body["n"] = rng.randrange(2, 4)
    return body


def _completion(rng: random.Random) -> Body:
    body: Body = {"prompt": prose(rng), "stream_options": {"include_usage": True}}
    if rng.random() < 0.15:
        body["prompt"] = [prose(rng) for _ in range(2)]
    if rng.random() < 0.2:
        body["echo"] = True
    if rng.random() < 0.2:
        body["logprobs"] = rng.randrange(6)
    if rng.random() < 0.2:
        body["n"] = rng.randrange(2, 4)
    return body


def _message(rng: random.Random) -> Body:
    body: Body = {"messages": _messages(rng)}
    if rng.random() < 0.3:
        body["system"] = "Answer briefly."
    if rng.random() < 0.2:
        body["tools"] = [{"name": "greet", "input_schema": STATEMENT}]
        body["tool_choice"] = {"type": rng.choice(["auto", "any"])}
    return body


def _response(rng: random.Random) -> Body:
    body: Body = {"input": prose(rng)}
    if rng.random() < 0.3:
        body["instructions"] = "Answer briefly."
    if rng.random() < 0.2:
        body["tools"] = [{"type": "function", "name": "greet", "parameters": STATEMENT}]
    return body


BODIES: dict[str, Callable[[random.Random], Body]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/messages": _message,
    "/v1/responses": _response,
    "/completion": lambda rng: {"prompt": prose(rng)},
    "/tokenize": lambda rng: {"prompt": prose(rng)},
    "/v1/messages/count_tokens": _message,
}
ANSWERED = {  # path → its name of the limit
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/completion": "n_predict",
}
COUNTED = ("/tokenize", "/v1/messages/count_tokens")


def events_of(text: str) -> list[Body]:
    """Return the events of a stream, `[DONE]` as one with the key `done`."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [{"done": True} if line == "[DONE]" else json.loads(line) for line in lines]


def problems(asked: Drawn, text: str) -> list[str]:
    """Return what is wrong with the whole body of an answer with status 200."""
    if asked.path in COUNTED:
        told = json.loads(text)
        return [] if told.get("count", told.get("input_tokens", 0)) > 0 else [f"counted {text!r}"]
    rows = events_of(text) if asked.is_streamed else [json.loads(text)]
    if errors := [row for row in rows if row.get("error") or row.get("type") == "error"]:
        return [f"an error behind status 200: {errors[0]}"]
    ends, tokens = READERS[asked.path](rows, asked.is_streamed)
    wanted = dict.fromkeys(range(asked.texts), 1)
    found = [] if ends == wanted else [f"ends {dict(ends)} of {asked.texts} texts"]
    if len(tokens) != 1 or not 0 <= tokens[0] <= asked.texts * asked.limit:
        found.append(f"usage {tokens} for {asked.texts} texts of at most {asked.limit} tokens")
    return found


Read = tuple[Counter[int], list[int]]  # ends by the number of the text, counts of tokens


def _of_openai(rows: list[Body], is_streamed: bool) -> Read:
    ends = Counter(
        choice["index"]
        for row in rows
        for choice in row.get("choices", [])
        if choice["finish_reason"] is not None
    )
    if is_streamed and [i for i, row in enumerate(rows) if row.get("done")] != [len(rows) - 1]:
        ends[-1] += 1
    return ends, [row["usage"]["completion_tokens"] for row in rows if row.get("usage")]


def _of_llama(rows: list[Body], is_streamed: bool) -> Read:
    ends = [row for row in rows if row["stop"]]
    return Counter(row["index"] for row in ends), [row["tokens_predicted"] for row in ends]


def _of_messages(rows: list[Body], is_streamed: bool) -> Read:
    if not is_streamed:
        return Counter([0] * bool(rows[0]["stop_reason"])), [rows[0]["usage"]["output_tokens"]]
    kinds = [row["type"] for row in rows]
    deltas = [row for row in rows if row["type"] == "message_delta"]
    is_whole = kinds[0] == "message_start" and kinds.index("message_stop") == len(kinds) - 1
    stops = [row for row in deltas if row["delta"]["stop_reason"]]
    opened, closed = (kinds.count(f"content_block_{word}") for word in ("start", "stop"))
    is_whole = is_whole and opened == closed
    return Counter([0 if is_whole else -1] * len(stops)), _tokens(deltas)


def _of_responses(rows: list[Body], is_streamed: bool) -> Read:
    if not is_streamed:
        return Counter([0] * (rows[0]["status"] in ("completed", "incomplete"))), _tokens(rows)
    ends = [row for row in rows if row["type"] in FINAL]
    is_whole = rows[-1]["type"] in FINAL[:2]
    return Counter([0 if is_whole else -1] * len(ends)), _tokens(row["response"] for row in ends)


def _tokens(rows: Iterable[Body]) -> list[int]:
    return [row["usage"]["output_tokens"] for row in rows]


READERS: dict[str, Callable[[list[Body], bool], Read]] = {
    "/v1/chat/completions": _of_openai,
    "/v1/completions": _of_openai,
    "/v1/messages": _of_messages,
    "/v1/responses": _of_responses,
    "/completion": _of_llama,
}
