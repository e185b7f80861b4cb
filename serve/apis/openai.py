"""OpenAI's dialect: parts of answers as chunks, which a stream sends and a plain answer joins."""

import asyncio
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from exl2flow.engine.chat import CallBegin
from exl2flow.engine.generate import Event, Statistics
from exl2flow.serve.answers.answer import Part, RunningAnswer, Text, Update
from exl2flow.serve.answers.fields import Body, ChatBody, CompletionBody
from exl2flow.serve.answers.logprobs import Row, rows_of, rows_of_prompt
from exl2flow.serve.apis.chat_tools import customs_of
from exl2flow.serve.errors import ApiError, body
from exl2flow.serve.hosts.model_host import ModelHost

DONE, PING = b"data: [DONE]\n\n", b": ping\n\n"
Chunk = dict[str, Any]  # what is new of a choice; calls of functions are a mapping by their index


class Dialect(ABC):
    """One answer in the form of an API; prefix: of its id."""

    prefix = ""

    def __init__(self, answer: RunningAnswer, body: Body, host: ModelHost) -> None:
        self.answer = answer
        id_ = f"{self.prefix}{secrets.token_hex(12)}"
        self._head = {"id": id_, "created": answer.created, "model": host.name}

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """Return the answer when it is complete.

        Raises:
            Exception: what ended a text.
        """

    @abstractmethod
    def stream(self) -> AsyncGenerator[bytes]:
        """Yield the answer as it comes, as events of SSE.

        Raises:
            Exception: what ended a text.
        """

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a stream with an error."""
        return sse(body(error))


class ChunkDialect(Dialect):
    """An answer in OpenAI's form, as choices whose chunks are joined to a plain answer."""

    kind = chunk_kind = ""
    done, _has_logs = DONE, False

    def __init__(self, answer: RunningAnswer, body: Body, host: ModelHost) -> None:
        super().__init__(answer, body, host)
        self.names = host.tokens
        self._by_id = body.return_tokens_as_token_ids
        self._wants_usage = bool(body.stream_options.get("include_usage"))

    @abstractmethod
    def opening(self, index: int) -> Chunk:
        """Return what comes before the text of a choice."""

    @abstractmethod
    def chunk(self, update: Update) -> Chunk:
        """Return what an update adds to a choice."""

    @abstractmethod
    def streamed(self, chunk: Chunk) -> Chunk:
        """Return a choice of a stream."""

    def plain(self, choice: Chunk) -> Chunk:
        """Return a choice of a plain answer, from its chunks joined."""
        return choice

    async def _batches(self) -> AsyncIterator[tuple[dict[int, Chunk], dict[int, Chunk]]]:
        """Yield what is new of each choice, and ends of choices."""
        async for updates in self._updates():
            new, ends = dict[int, Chunk](), dict[int, Chunk]()
            for update in updates:
                if update.event.scores is None:
                    chunk = self.chunk(update)
                else:  # of a long prompt they take seconds, in which others' streams go on
                    chunk = await asyncio.to_thread(self.chunk, update)
                new[update.index] = joined(new.get(update.index), chunk)
                if update.event.reason is not None:
                    calls = self.answer.choices[update.index].calls
                    ends[update.index] = ended(update.event, has_calls=calls > 0)
            yield new, ends

    async def _updates(self) -> AsyncIterator[list[Update]]:
        """Yield updates, one at a time with log probabilities: SillyTavern reads one per event."""
        async for batch in self.answer.updates():
            for part in [[one] for one in batch] if batch and self._has_logs else [batch]:
                yield part

    async def choices(self) -> list[Chunk]:
        """Return the choices when all are complete, each as its chunks joined."""
        choices = [self.opening(i) for i in range(len(self.answer.choices))]
        async for new, ends in self._batches():
            for index, chunk in [*new.items(), *ends.items()]:
                choices[index] = joined(choices[index], chunk)
        return choices

    async def whole(self) -> dict[str, Any]:
        """See `Dialect`."""
        choices = await self.choices()
        shown = [{"index": i, "logprobs": None, **self.plain(c)} for i, c in enumerate(choices)]
        return {**self._head, "object": self.kind, "choices": shown, **self._counts()}

    async def stream(self) -> AsyncGenerator[bytes]:
        """See `Dialect`."""
        openings = [(i, self.opening(i)) for i in range(len(self.answer.choices))]
        pieces = [self._event(index, chunk) for index, chunk in openings if chunk]
        async for new, ends in self._batches():
            news = [self._event(i, c) for i, c in [*new.items(), *ends.items()] if c]
            if news or not new:  # no update at all is a pause
                yield b"".join(pieces + news) or PING
                pieces.clear()
        if self._wants_usage:
            last = {**self._head, "object": self.chunk_kind, "choices": [], **self._counts()}
            yield sse(last)
        yield self.done

    def _event(self, index: int, chunk: Chunk) -> bytes:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **self.streamed(chunk)}
        usage = {"usage": None} if self._wants_usage else {}
        return sse({**self._head, "object": self.chunk_kind, "choices": [choice], **usage})

    def _counts(self) -> dict[str, Any]:
        """Return usage, and counts and times of the first text."""
        counts = self.answer.ends[0].statistics
        if counts is None:
            return {"usage": self.answer.usage()}
        return {"usage": self.answer.usage(), "timings": timings_of(counts)}


def timings_of(counts: Statistics) -> dict[str, Any]:
    """Return counts and times (ms) of a text under llama-server's names."""
    return {
        "prompt_n": counts.prompt_tokens - counts.cached_tokens,
        "cache_n": counts.cached_tokens,
        "prompt_ms": round(counts.prompt_seconds * 1e3, 3),
        "predicted_n": counts.new_tokens,
        "predicted_ms": round(counts.text_seconds * 1e3, 3),
        "draft_n": counts.drafted_tokens,
        "draft_n_accepted": counts.accepted_tokens,
    }


def sse(value: Mapping[str, Any]) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


def joined(old: Any, new: Any) -> Any:
    """Return two pieces of an answer as one: texts and lists follow each other; may change old."""
    match old, new:
        case (None, _) | (_, None):
            return new if old is None else old
        case (str(), str()) | (list(), list()):
            old += new
            return old
        case dict(), dict():
            for key, value in new.items():
                old[key] = joined(old.get(key), value)
            return old
    return new


def ended(event: Event, *, has_calls: bool) -> Chunk:
    """Return why a text ended; raises `ApiError` if the server did it."""
    if event.reason == "cancelled":
        raise ApiError(503, "the server stops; what came until now is valid", code="draining")
    reason = "length" if event.reason == "max_new_tokens" else "stop"
    finish = "tool_calls" if has_calls and reason == "stop" else reason
    trigger = "loop" if event.reason == "loop" else event.trigger
    return {"finish_reason": finish, "stop_reason": trigger}


class ChatDialect(ChunkDialect):
    """A chat completion; chunks have a `delta`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, answer: RunningAnswer, body: ChatBody, host: ModelHost) -> None:
        super().__init__(answer, body, host)
        thoughts = host.options.reasoning_field
        fields = ("reasoning_content", "reasoning") if thoughts == "both" else (thoughts,)
        self._thoughts = fields if body.include_reasoning else ()
        self._has_logs = body.logprobs
        self._numbers: list[dict[str, int]] = [{} for _ in answer.choices]
        self._is_older, self._customs = bool(body.functions), customs_of(body.tools)
        self._inputs = dict[str, str]()  # of calls of custom tools: JSON until now

    def opening(self, index: int) -> Chunk:
        return {"delta": {"role": "assistant", "content": ""}}

    def chunk(self, update: Update) -> Chunk:
        delta, numbers = dict[str, Any](), self._numbers[update.index]
        for part in update.parts:
            delta = joined(delta, self._delta(part, numbers))
        chunk: Chunk = {"delta": delta} if delta else {}
        if self._has_logs and (logs := self.names.chat(update.event, by_id=self._by_id)):
            chunk = {"delta": delta, "logprobs": {"content": logs, "refusal": None}}
        return chunk

    def _delta(self, part: Part, numbers: dict[str, int]) -> dict[str, Any]:
        match part:
            case Text(text=text, is_thought=False):
                return {"content": text}
            case Text(text=text):
                return dict.fromkeys(self._thoughts, text)
            case CallBegin(id=id_, name=name):
                numbers[id_] = len(numbers)
                kind, text_of = "function", "arguments"
                if name in self._customs:
                    kind, text_of, self._inputs[id_] = "custom", "input", ""
                call = {"id": id_, "type": kind, kind: {"name": name, text_of: ""}}
                return {"tool_calls": {numbers[id_]: call}}
        if part.id in self._inputs:
            text = self._input(part.id, part.text)
            return {"tool_calls": {numbers[part.id]: {"custom": {"input": text}}}} if text else {}
        return {"tool_calls": {numbers[part.id]: {"function": {"arguments": part.text}}}}

    def _input(self, id_: str, more: str) -> str:
        """Return the text for a custom tool when the JSON around it has ended."""
        self._inputs[id_] += more
        if not more.rstrip().endswith("}"):
            return ""
        try:
            return str(json.loads(self._inputs[id_]).get("input", ""))
        except ValueError:
            return ""

    def streamed(self, chunk: Chunk) -> Chunk:
        chunk, delta = self._in_older_form(chunk), chunk.get("delta", {})
        if "tool_calls" in delta:
            by_place = delta["tool_calls"]
            calls = [{"index": index, **call} for index, call in by_place.items()]
            delta = {**delta, "tool_calls": calls}
            if self._is_older and 0 in by_place:
                delta["function_call"] = by_place[0]["function"]
        return {**chunk, "delta": delta}

    def _in_older_form(self, choice: Chunk) -> Chunk:
        """Return a choice for a client that gives `functions`: it ends in `function_call`."""
        if self._is_older and choice.get("finish_reason") == "tool_calls":
            return {**choice, "finish_reason": "function_call"}
        return choice

    def plain(self, choice: Chunk) -> Chunk:
        message = {**choice.pop("delta"), "refusal": None}
        if "tool_calls" in message:
            calls = [*message["tool_calls"].values()]
            message |= {"content": message["content"] or None, "tool_calls": calls}
            if self._is_older:
                message["function_call"] = calls[0]["function"]
        return {**self._in_older_form(choice), "message": message}


class CompletionDialect(ChunkDialect):
    """Completions of one or more prompts."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, answer: RunningAnswer, body: CompletionBody, host: ModelHost) -> None:
        super().__init__(answer, body, host)
        self._body, self._has_logs = body, body.logprobs is not None
        self._offsets = [0] * len(answer.choices)

    def opening(self, index: int) -> Chunk:
        if not self._body.echo:
            return {}
        given, number = self._body.prompt, index // self._body.n
        prompt = given if isinstance(given, str) else given[number]
        if not isinstance(prompt, str):  # special tokens as their names
            names = map(self.names.bytes, self.answer.plan.prompts[number])
            prompt = b"".join(names).decode("utf-8", "replace")
        return {"text": prompt}

    def chunk(self, update: Update) -> Chunk:
        event, rows, logs = update.event, list[Row](), None
        if event.scores is not None and self._body.echo:
            rows += rows_of_prompt(event.scores)
        rows += rows_of(event)
        if self._body.echo and event.reason == "stop_token" and event.held is not None:
            rows += rows_of(event.held)  # which lm-eval leaves out
        if self._has_logs and rows:
            at, top = self._offsets[update.index], self._body.logprobs or 0
            logs = self.names.columns(rows, at, top=top, by_id=self._by_id)
            self._offsets[update.index] += sum(len(self.names.text(row[0])) for row in rows)
        text = "".join(part.text for part in update.parts if isinstance(part, Text))
        chunk: Chunk = {"text": text, "logprobs": logs} if text or logs else {}
        if event.scores is not None and self._body.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = self.names.prompt(event.scores)
        return chunk

    def streamed(self, chunk: Chunk) -> Chunk:
        return {"text": "", **chunk}

    def plain(self, choice: Chunk) -> Chunk:
        return self.streamed(choice)
