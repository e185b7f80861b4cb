"""A client that takes a server to its limits: long conversations and prompts, cut-off answers."""

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from typing import Any

from exl2flow.cli.work.own_server import HOST
from exl2flow.core import words
from exl2flow.core.errors import ServerFailed
from exl2flow.kernels import PAGE_TOKENS

KINDS = ("conversation", "conversation", "long prompt", "conversation", "cancelled")
SWAP = "swap"  # a turn of its own where there are several models
ANSWER = 32  # tokens of an answer at most, where the context has room for more
SHARE = 8  # turns in which a conversation fills its context
SECONDS = 3600.0  # without a byte from the server
WORDS = "seven red fish sleep while an old clock counts warm rain, slow trains and letters home"


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What came of one request: its seconds to the first token and between two, at most.

    tokens: of the prompt, as the server counted them; failure: why it failed; None: it did not.
    """

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    slowest: float = 0.0
    failure: str | None = None


class SoakClient:
    """Talks to a server: as many conversations as it has slots."""

    def __init__(self, port: int) -> None:
        self._port, self._random = port, random.Random(0)
        status = self._told("/v1/status")
        self.slots, self.room = int(status["slots"]), int(status["max_model_len"])
        self.tokens = int(status["cache_pages"]) * PAGE_TOKENS  # of the cache
        share = min(self.room, self.tokens // self.slots)  # of a conversation
        self.answer = max(1, min(ANSWER, share // 4))
        self._share, self._texts = share, [""] * self.slots
        self._models = [str(row["id"]) for row in self._told("/v1/models")["data"]]
        self.kinds = (*KINDS, SWAP) if self._models[1:] else KINDS
        self._per_word = 4.0  # tokens, at most; the answers tell
        self._failed = [one for one in [self._counted(self._words(64))] if one.failure]

    def _told(self, path: str) -> dict[str, Any]:
        connection = HTTPConnection(HOST, self._port, timeout=SECONDS)
        try:
            connection.request("GET", path)
            found: dict[str, Any] = json.load(connection.getresponse())
            return found
        except (OSError, HTTPException, ValueError) as error:
            raise ServerFailed(f"the server does not answer `{path}`: {error}") from error
        finally:
            connection.close()

    def turn(self, kind: str, turn: int) -> list[TurnResult]:
        """Run a turn; the conversations continue together."""
        failed, self._failed = self._failed, []
        if failed:
            return failed
        if kind == "conversation":
            with ThreadPoolExecutor(self.slots) as pool:
                return [*pool.map(self._continue, range(self.slots))]
        if kind == SWAP:
            names = [*self._models[1:], self._models[0]]
            return [self.ask(self._words(32), self.answer, model=name) for name in names]
        prompt = f"{turn} " + self._words(self._count(self.room - self.answer) - 1)
        if kind == "cancelled":
            return [self.ask(prompt, self.answer, leaves=True)]
        return [self._counted(prompt)]

    def _counted(self, prompt: str) -> TurnResult:
        """Ask, and note how many tokens words have."""
        found = self.ask(prompt, self.answer)
        if found.tokens:
            self._per_word = max(1.0, found.tokens / len(prompt.split()))
        return found

    def _continue(self, slot: int) -> TurnResult:
        """Let a conversation grow; it begins anew when its share of the cache is full."""
        more = self._words(self._count(self._share // SHARE))
        text = f"{self._texts[slot]} {more}".strip()
        if len(text.split()) > self._count(self._share - self.answer):
            text = more
        found = self.ask(text, self.answer)
        self._texts[slot] = text + found.text
        return found

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS.split(), k=max(1, count)))

    def _count(self, tokens: int) -> int:
        """Return how many words have at most so many tokens."""
        return int(0.97 * tokens / self._per_word)

    def ask(
        self, prompt: str, tokens: int, *, leaves: bool = False, model: str | None = None
    ) -> TurnResult:
        """Return what a prompt is continued with; leaves: stop reading after the first token."""
        body = {
            "model": model or self._models[0],
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        connection, begun = HTTPConnection(HOST, self._port, timeout=SECONDS), time.monotonic()
        headers = {"content-type": "application/json"}
        text, counted, times = "", 0, [begun]
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            for event in _events(connection):
                if "error" in event:
                    return TurnResult(failure=str(event["error"].get("message", event["error"])))
                counted = (event.get("usage") or {}).get("prompt_tokens", counted)
                if event.get("choices"):
                    text += event["choices"][0]["text"]
                    times.append(time.monotonic())
                    if leaves:
                        break
        except (OSError, HTTPException, ValueError) as error:
            return TurnResult(failure=words.cause(error) or type(error).__name__)
        finally:
            connection.close()
        first, *gaps = [after - before for before, after in pairwise(times)] or [0.0]
        return TurnResult(text, counted, first, max(gaps, default=0.0))


def _events(connection: HTTPConnection) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream, or the error that came instead."""
    response = connection.getresponse()
    if response.status != 200:
        yield json.load(response)
        return
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)
