"""OpenAI's dialect: parts of answers as chat completions and completions, plain and streamed."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from exl2flow.inference.chat import CallArguments, CallBegin
from exl2flow.inference.generate import Event
from exl2flow.serve.answers import Part, RunningAnswer, Said, Thought, Update
from exl2flow.serve.errors import ApiError
from exl2flow.serve.fields import Body, ChatBody, CompletionBody
from exl2flow.serve.logprobs import LogprobColumns, Names, joined
from exl2flow.serve.stream import DONE, PING, sse_head

# of events → `finish_reason`
REASONS = {"max_new_tokens": "length"}


class Dialect:
    """One answer in OpenAI's form."""

    kind = chunk_kind = prefix = ""

    def __init__(
        self, answer: RunningAnswer, body: Body, model: str, names: Names, *, has_logs: bool
    ) -> None:
        """has_logs: chunks keep the events of tokens apart."""
        self.answer, self.model, self.names = answer, model, names
        self.wants_usage = bool(body.stream_options.get("include_usage"))
        self.head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": answer.created,
            "model": model,
        }
        self.has_logs = has_logs
        self._before = sse_head({**self.head, "object": self.chunk_kind})

    async def whole(self) -> dict[str, Any]:
        """Return the answer when it is complete.

        Raises:
            Exception: what ended a text.
        """
        updates: list[list[Update]] = [[] for _ in self.answer.choices]
        async for batch in self.answer.updates():
            for update in batch:
                updates[update.index].append(update)
                _check(update)

        def choices() -> list[dict[str, Any]]:
            return [self.choice(index, each) for index, each in enumerate(updates)]

        # log probabilities of a long prompt take seconds, in which others' streams go on
        shown = await asyncio.to_thread(choices) if self.has_logs else choices()
        usage = self.answer.usage()
        timings = timings_of(self.answer)
        return {**self.head, "object": self.kind, "choices": shown, "usage": usage, **timings}

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yield the answer as it comes, as events of SSE.

        Raises:
            Exception: what ended a text.
        """
        for index in range(len(self.answer.choices)):
            for chunk in self.opening(index):
                yield self._chunk([chunk])
        async for batch in self.answer.updates():
            pieces = list[bytes]()
            for update in _merged(batch, keeps_events=self.has_logs):
                _check(update)
                pieces += [self._chunk([chunk]) for chunk in self.chunks(update)]
            if pieces or not batch:
                yield b"".join(pieces) or PING
        if self.wants_usage:
            usage = {"usage": self.answer.usage(), **timings_of(self.answer)}
            yield self._chunk([], usage)
        yield DONE

    def _chunk(self, choices: Sequence[Mapping[str, Any]], more: Any = None) -> bytes:
        usage = {"usage": None} if self.wants_usage and more is None else more or {}
        shown = json.dumps(choices, ensure_ascii=False).encode("utf-8", "replace")
        if not usage:
            return self._before + shown + b"}\n\n"
        return self._before + shown + b", " + json.dumps(usage)[1:].encode() + b"\n\n"

    def opening(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield what comes before the text of a choice."""
        yield from ()

    def chunks(self, update: Update) -> Iterator[dict[str, Any]]:
        """Yield the choices of chunks that an update becomes."""
        raise NotImplementedError

    def choice(self, index: int, updates: Sequence[Update]) -> dict[str, Any]:
        """Return a complete choice."""
        raise NotImplementedError


def _check(update: Update) -> None:
    if update.end is not None and update.end.reason == "cancelled":
        raise ApiError(503, "the server stops; what came until now is valid", code="draining")


def _merged(batch: Sequence[Update], *, keeps_events: bool) -> Iterator[Update]:
    """Join what is new of a choice, and parts of text that follow each other."""
    groups = list[list[Update]]()
    for update in batch:
        if groups and groups[-1][-1].index == update.index and not keeps_events:
            groups[-1].append(update)
        else:
            groups.append([update])
    for group in groups:
        parts = list[Part]()
        for part in (part for update in group for part in update.parts):
            last = parts[-1] if parts else None
            match last, part:
                case (Said(text=a), Said(text=b)):
                    parts[-1] = Said(a + b)
                case (Thought(text=a), Thought(text=b)):
                    parts[-1] = Thought(a + b)
                case _:
                    parts.append(part)
        yield Update(group[-1].index, parts, group[-1].event)


def ended(event: Event, *, calls: int = 0) -> dict[str, Any]:
    """Return why a text ended."""
    reason = REASONS.get(str(event.reason), "stop")
    stop = event.trigger if isinstance(event.trigger, int | str) else None
    named = "loop" if event.reason == "loop" else stop
    return {
        "finish_reason": "tool_calls" if calls and reason == "stop" else reason,
        "stop_reason": named,
    }


def timings_of(answer: RunningAnswer) -> dict[str, Any]:
    """Return times as llama-server gives them, of the first text."""
    counts = answer.ends[0].statistics if 0 in answer.ends else None
    if counts is None:
        return {}
    return {
        "timings": {
            "prompt_n": counts.prompt_tokens - counts.cached_tokens,
            "cache_n": counts.cached_tokens,
            "prompt_ms": round(counts.prompt_seconds * 1e3, 3),
            "predicted_n": counts.new_tokens,
            "predicted_ms": round(counts.text_seconds * 1e3, 3),
            "draft_n": counts.drafted_tokens,
            "draft_n_accepted": counts.accepted_tokens,
        }
    }


class ChatDialect(Dialect):
    """A chat completion."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, answer: RunningAnswer, body: ChatBody, model: str, names: Names, *, thoughts: str
    ) -> None:
        """thoughts: name of the field, or `both`."""
        super().__init__(answer, body, model, names, has_logs=body.logprobs)
        both = ("reasoning_content", "reasoning")
        self._thoughts = both if thoughts == "both" else (thoughts,)
        self._shows = body.include_reasoning
        self._by_id = body.return_tokens_as_token_ids
        self._numbers: list[dict[str, int]] = [{} for _ in answer.choices]

    def opening(self, index: int) -> Iterator[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunks(self, update: Update) -> Iterator[dict[str, Any]]:
        numbers, logs = self._numbers[update.index], self._log(update.event)
        base = {"index": update.index, "finish_reason": None}
        deltas = [d for part in update.parts if (d := self._delta(part, numbers))]
        if not deltas and logs is not None and logs["content"]:
            deltas = [{}]
        for at, delta in enumerate(deltas):
            yield {**base, "delta": delta, "logprobs": None if at else logs}
        if update.end is not None:
            calls = self.answer.choices[update.index].calls
            yield {**base, "delta": {}, "logprobs": None, **ended(update.end, calls=calls)}

    def _delta(self, part: Part, numbers: dict[str, int]) -> dict[str, Any]:
        match part:
            case Said(text=text):
                return {"content": text}
            case Thought(text=text):
                return dict.fromkeys(self._thoughts, text) if self._shows else {}
            case CallBegin(id=id_, name=name):
                numbers[id_] = len(numbers)
                function = {"name": name, "arguments": ""}
                call = {"index": numbers[id_], "id": id_, "type": "function", "function": function}
                return {"tool_calls": [call]}
            case CallArguments(id=id_, text=text):
                return {"tool_calls": [{"index": numbers[id_], "function": {"arguments": text}}]}

    def _log(self, event: Event) -> dict[str, Any] | None:
        if not self.has_logs:
            return None
        return {"content": self.names.chat(event, by_id=self._by_id), "refusal": None}

    def choice(self, index: int, updates: Sequence[Update]) -> dict[str, Any]:
        content, thoughts, calls = "", "", dict[str, dict[str, Any]]()
        logs = list[dict[str, Any]]()
        for update in updates:
            for part in update.parts:
                match part:
                    case Said(text=text):
                        content += text
                    case Thought(text=text):
                        thoughts += text
                    case CallBegin(id=id_, name=name):
                        function = {"name": name, "arguments": ""}
                        calls[id_] = {"id": id_, "type": "function", "function": function}
                    case CallArguments(id=id_, text=text):
                        calls[id_]["function"]["arguments"] += text
            logs += self.names.chat(update.event, by_id=self._by_id) if self.has_logs else []
        message: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
        if not calls:
            message["content"] = content
        else:
            message["tool_calls"] = [*calls.values()]
        if thoughts and self._shows:
            message |= dict.fromkeys(self._thoughts, thoughts)
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": logs, "refusal": None} if self.has_logs else None,
            **ended(updates[-1].event, calls=len(calls)),
        }


class CompletionDialect(Dialect):
    """Completions of one or more prompts."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, answer: RunningAnswer, body: CompletionBody, model: str, names: Names
    ) -> None:
        has_logs = body.logprobs is not None
        super().__init__(answer, body, model, names, has_logs=has_logs)
        self._body, top = body, body.logprobs or 0
        by_id = body.return_tokens_as_token_ids
        self._columns = [LogprobColumns(names, top=top, by_id=by_id) for _ in answer.choices]

    def chunks(self, update: Update) -> Iterator[dict[str, Any]]:
        text, logs = self._read(update)
        end = {"finish_reason": None} if update.end is None else ended(update.end)
        if text or logs or update.end is not None:
            yield {"index": update.index, "text": text, "logprobs": logs, **end}

    def choice(self, index: int, updates: Sequence[Update]) -> dict[str, Any]:
        read = [self._read(update) for update in updates]
        logs = [columns for _, columns in read if columns is not None]
        choice = {
            "index": index,
            "text": "".join(text for text, _ in read),
            "logprobs": joined(logs) if logs else None,
            **ended(updates[-1].event),
        }
        scores = [u.event.scores for u in updates if u.event.scores is not None]
        if self._body.prompt_logprobs is not None and scores:
            choice["prompt_logprobs"] = self.names.prompt(scores[0])
        if self._body.echo and self._body.logprobs is None:
            choice["text"] = self._echo(index) + choice["text"]
        return choice

    def opening(self, index: int) -> Iterator[dict[str, Any]]:
        if self._body.echo and self._body.logprobs is None:
            text = self._echo(index)
            yield {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _echo(self, index: int) -> str:
        """Return the prompt of a choice, special tokens as their names."""
        given, number = self._body.prompt, index // self._body.n
        prompt = given if isinstance(given, str) else given[number]
        if isinstance(prompt, str):
            return prompt
        ids = self.answer.plan.prompts[number]
        return b"".join(map(self.names.bytes, ids)).decode("utf-8", "replace")

    def _read(self, update: Update) -> tuple[str, dict[str, Any] | None]:
        """Return text and columns of an update, those of an echoed prompt first."""
        event, columns = update.event, self._columns[update.index]
        found, text = list[dict[str, Any]](), ""
        if event.scores is not None and self._body.echo and self.has_logs:
            found.append(columns.of_prompt(event.scores))
            text = self._echo(update.index)
        if self.has_logs and event.ids and event.probabilities:
            found.append(columns.of_text(event))
        text += "".join(part.text for part in update.parts if isinstance(part, Said))
        return text, joined(found) if found else None
