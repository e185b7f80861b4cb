"""Messages and Responses share this: bodies become chats, answers are blocks of one kind each."""

import json
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Annotated, Any, ClassVar, Literal

from exl2flow.engine.chat import CallArguments, CallBegin
from exl2flow.serve.answers.answer import AnswerPlan, Part, Text, Update
from exl2flow.serve.answers.bounds import MOST_MESSAGES, MOST_TOOLS, Name, most
from exl2flow.serve.answers.fields import ChatBody
from exl2flow.serve.apis import chats
from exl2flow.serve.apis.openai import Chunk, Dialect, ended, sse
from exl2flow.serve.hosts.model_host import ModelHost

Json = dict[str, Any]


class AgentBody(ChatBody):
    """A conversation in another form.

    dropped: tools that are no functions. left_out: kinds of what the vendor's tools have left in
    the conversation.
    """

    dialect: ClassVar[Mapping[str, str]] = {"dropped": "tools", "left_out": "messages"}

    left_out: Annotated[tuple[Name, ...], most(MOST_TOOLS)] = ()
    dropped: Annotated[tuple[Name, ...], most(MOST_TOOLS)] = ()


def plan_of(body: AgentBody, host: ModelHost) -> AnswerPlan:
    """See `chats.plan_of`."""
    tools = [f"the tool {name} is not a function, so it is left out" for name in body.dropped]
    rest = [
        f"what the vendor's tools left in the conversation, {kind}, is not read"
        for kind in sorted({*body.left_out})
    ]
    return chats.plan_of(body, host, [*tools, *rest])


def objects(given: object, field: str) -> list[Json]:
    """Return a field that is a list of objects, or a text as the only part; raises `ValueError`."""
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise ValueError(f"`{field}` takes a list of objects")
    if len(given) > MOST_MESSAGES + 1:  # before each is looked at
        raise ValueError(f"`{field}` has {len(given)} elements; it may have {MOST_MESSAGES}")
    return given


def bounded(given: object) -> object:
    """Return a list without elements far beyond the bound, which one too many shows."""
    return given[: MOST_MESSAGES + 1] if isinstance(given, list) else given


def words_of(value: object) -> str:
    """Return a field that is a text, which may be null or absent."""
    return "" if value is None else str(value)


def turns(parts: Iterable[Json]) -> list[Json]:
    """Return messages, of which an assistant's neighbours are one: thoughts, texts and calls."""
    found = list[Json]()
    for role, group in groupby(parts, lambda part: part["role"]):
        if role != "assistant":
            found += group
            continue
        pieces = dict[str, list[Any]]()
        for name, value in (row for part in group for row in part.items() if row[0] != "role"):
            pieces.setdefault(name, []).append(value)
        found.append({"role": role, **{name: _whole(each) for name, each in pieces.items()}})
    return found


def conversation(parts: Iterable[Json]) -> Json:
    """Return the fields `messages`, and `left_out` of parts that are kinds of what is not read."""
    told = [*parts]
    return {
        "messages": turns(part for part in told if "left_out" not in part),
        "left_out": (*dict.fromkeys(part["left_out"] for part in told if "left_out" in part),),
    }


def _whole(pieces: Sequence[Any]) -> Any:
    return "".join(pieces) if isinstance(pieces[0], str) else [*chain.from_iterable(pieces)]


def call(id_: object, name: object, arguments: object) -> Json:
    """Return a call of a function in a conversation."""
    inner = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": id_, "type": "function", "function": inner}]}


@dataclass(slots=True)
class Block:
    """A piece of an answer.

    text: until now, of a call its arguments; sent: characters of it; is_cut: it ends at a limit.
    """

    kind: Literal["thinking", "text", "call"]
    index: int
    id: str = ""
    name: str = ""
    text: str = ""
    sent: int = 0
    is_cut: bool = False

    @property
    def arguments(self) -> Json | None:
        """The arguments of a call, None if it is cut off."""
        try:
            found: Json = json.loads(self.text) if self.kind == "call" else {}
        except ValueError:
            return None
        return found


class AgentDialect(Dialect):
    """One text as blocks; a plain answer is made of the same blocks as a stream."""

    ping = b""

    @abstractmethod
    def opening_events(self) -> Sequence[Json]:
        """Return the events before the first block."""

    @abstractmethod
    def begun(self, block: Block) -> Sequence[Json]:
        """Return the events that begin a block."""

    @abstractmethod
    def added(self, block: Block, text: str) -> Sequence[Json]:
        """Return the events of new text."""

    @abstractmethod
    def closed(self, block: Block) -> Sequence[Json]:
        """Return the events behind the last text of a block."""

    @abstractmethod
    def closing_events(self) -> Sequence[Json]:
        """Return the events behind the last block."""

    @abstractmethod
    def complete(self) -> Json:
        """Return the whole answer."""

    async def whole(self) -> Json:
        self._start()
        async for batch in self.answer.updates():
            [*self._read(batch)]
        return self.complete()

    async def stream(self) -> AsyncGenerator[bytes]:
        self._start()
        events = [*self.opening_events()]
        async for batch in self.answer.updates():
            events += self._read(batch)
            if events or not batch:
                yield b"".join(map(self.event, events)) or self.ping
                events.clear()
        yield b"".join(map(self.event, self.closing_events()))

    def event(self, value: Json) -> bytes:
        """Return an event of SSE with its name."""
        return f"event: {value['type']}\n".encode() + sse(value)

    def _start(self) -> None:
        self.blocks, self.end = list[Block](), Chunk()
        self._space, self._is_open = "", False

    def _read(self, batch: Sequence[Update]) -> Iterator[Json]:
        for update in batch:
            for part in update.parts:
                yield from self._take(part)
            if update.event.reason is not None:
                has_calls = self.answer.choices[0].calls > 0
                self.end = ended(update.event, has_calls=has_calls)
                self._cut(is_cut=self.end["finish_reason"] == "length")
                yield from self._close()
        yield from self._send()

    def _cut(self, *, is_cut: bool) -> None:
        """Note that the block under way has no end of its own; a call that parses has one."""
        if self._is_open and self.blocks[-1].kind != "call":
            self.blocks[-1].is_cut = is_cut

    def _take(self, part: Part) -> Iterator[Json]:
        match part:
            case CallBegin(id=id_, name=name):
                yield from self._begin(Block("call", len(self.blocks), id_, name))
            case CallArguments(text=text):
                self.blocks[-1].text += text
            case Text(text=text, is_thought=is_thought):
                kind: Literal["thinking", "text"] = "thinking" if is_thought else "text"
                if not (self._is_open and self.blocks[-1].kind == kind):
                    self._space += text  # between blocks it is not text
                    if text.isspace() or not text:
                        return
                    text = self._space
                    yield from self._begin(Block(kind, len(self.blocks)))
                self.blocks[-1].text += text

    def _begin(self, block: Block) -> Iterator[Json]:
        yield from self._close()
        self.blocks.append(block)
        self._is_open, self._space = True, ""
        yield from self.begun(block)

    def _send(self) -> Iterator[Json]:
        if self._is_open and (new := self.blocks[-1].text[self.blocks[-1].sent :]):
            self.blocks[-1].sent += len(new)
            yield from self.added(self.blocks[-1], new)

    def _close(self) -> Iterator[Json]:
        yield from self._send()
        if self._is_open:
            self._is_open = False
            yield from self.closed(self.blocks[-1])
