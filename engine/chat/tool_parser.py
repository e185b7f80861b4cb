"""Read tool calls from a text that comes in pieces.

The parser is a coroutine over the text so far: it asks for more where a decision needs it, and
decides by what comes, never by where a piece ends. So any split of a text gives the same result.
"""

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from exl2flow.engine.chat.tool_events import (
    Call,
    CallArguments,
    CallBegin,
    CallEnd,
    Parsed,
    ToolEvent,
    ToolText,
    functions_of,
)
from exl2flow.engine.chat.tool_literals import json_value, parameter_value, python_value
from exl2flow.engine.chat.tools import NAME, ToolFormat

MOST_BETWEEN = 80  # characters behind a name: an id, or the kind of arguments
Reading = Generator[None, None, None]  # ends when what it reads has been read


class _BrokenCall(Exception):
    """Take back what began like a call and is none."""


def parse_calls(
    fmt: ToolFormat, text: str | Iterable[str], tools: Iterable[Mapping[str, Any]] = ()
) -> Parsed:
    """Return content and calls of a text, or of its pieces."""
    parser, parsed = ToolParser(fmt, tools), Parsed()
    events = [
        e for piece in ([text] if isinstance(text, str) else text) for e in parser.feed(piece)
    ]
    for event in events + parser.finish():
        match event:
            case ToolText(text=piece, is_broken=is_broken):
                parsed.content += piece
                parsed.is_broken |= is_broken
            case CallBegin(id=id_, name=name):
                parsed.calls.append(Call(id_, name))
            case CallArguments(text=piece):
                parsed.calls[-1].arguments += piece
            case CallEnd(is_valid=False):
                parsed.calls.pop()
    return parsed


class ToolParser:
    """Turn pieces of one text into events. Special tokens of the format must be spelled in it."""

    def __init__(self, fmt: ToolFormat, tools: Iterable[Mapping[str, Any]] = ()) -> None:
        """Begin a text; calls of other functions than `tools` stay text, unless it is empty."""
        self._fmt, self._functions = fmt, functions_of(tools)
        self._begins = [mark.rstrip("\n") for mark in (fmt.begin, *fmt.others) if mark]
        self._text, self._at, self._from, self._is_over = "", 0, 0, False
        self._events, self._open, self._count = list[ToolEvent](), "", 0
        one: dict[str, Callable[[], Reading]] = {
            "json": self._object,
            "json_list": self._objects,
            "name_json": self._name_json,
            "channel": self._name_json,
            "parameters": self._parameters,
            "pythonic": self._lines,
        }
        self._one = one[fmt.kind]
        self._reading = self._read()

    def feed(self, piece: str) -> list[ToolEvent]:
        """Return the events of a further piece."""
        self._text += piece
        return self._go_on()

    def finish(self) -> list[ToolEvent]:
        """Return the last events; the text is over."""
        self._is_over = True
        return self._go_on()

    def _go_on(self) -> list[ToolEvent]:
        next(self._reading, None)
        events, self._events = self._events, []
        return events

    def _read(self) -> Reading:
        if not self._fmt.begin:
            yield from self._space()
            head = self._text[self._at : self._at + 1]
            self._at = 0
            if head == ("{" if self._fmt.kind == "json" else "["):
                yield from self._section(0)
        while mark := (yield from self._next_begin()):
            yield from self._section(len(mark))
            yield from self._drop_space()

    def _next_begin(self) -> Generator[None, None, str]:
        """Pass on what comes before a mark, and return the mark; empty: the text is over."""
        while True:
            places = [(p, m) for m in self._begins if (p := self._text.find(m, self._at)) >= 0]
            if places:
                place, mark = min(places)
                self._pass(place)
                return mark
            rest = self._text[self._at :]
            held = 0 if self._is_over else max((_begun(rest, m) for m in self._begins), default=0)
            self._pass(len(self._text) - held)
            self._text, self._at = self._text[self._at :], 0
            if self._is_over:
                return ""
            yield

    def _pass(self, end: int, *, is_broken: bool = False) -> None:
        if end > self._at:
            self._events.append(ToolText(self._text[self._at : end], is_broken))
            self._at = end

    def _section(self, length: int) -> Reading:
        """Read the calls after a mark of `length` characters; pass anything else on as text."""
        fmt, self._from, self._count = self._fmt, self._at, len(self._events)
        has_begun = length > 0
        self._at += length
        try:
            while True:
                if fmt.call_begin:
                    yield from self._expect(fmt.call_begin)
                yield from self._one()
                if not fmt.call_begin or not (yield from self._is_next(fmt.call_begin)):
                    break
            if fmt.end and (yield from self._is_next(fmt.end)):
                yield from self._expect(fmt.end)
        except _BrokenCall:
            has_begun = has_begun or bool(self._open)
            if self._open:
                self._events.append(CallEnd(self._open, is_valid=False))
                self._open = ""
            end, self._at = self._at, self._from
            self._pass(end, is_broken=has_begun)

    def _drop_space(self) -> Reading:
        """Drop white space between calls and at the end; elsewhere it is text."""
        before = self._at
        yield from self._space()
        for mark in self._begins:
            if (yield from self._peek(len(mark))) == mark:
                return
        if not self._is_over or self._at < len(self._text):
            self._at = before

    # what a text is made of

    def _peek(self, count: int) -> Generator[None, None, str]:
        while len(self._text) - self._at < count and not self._is_over:
            yield
        return self._text[self._at : self._at + count]

    def _space(self) -> Reading:
        while (yield from self._peek(1)).isspace():
            self._at += 1

    def _is_next(self, mark: str) -> Generator[None, None, bool]:
        """Tell whether a mark follows, white space aside."""
        before = self._at
        yield from self._space()
        word = mark.split()[0]
        is_next = (yield from self._peek(len(word))) == word
        self._at = before
        return is_next

    def _expect(self, mark: str) -> Reading:
        for word in mark.split():
            yield from self._space()
            if (yield from self._peek(len(word))) != word:
                raise _BrokenCall
            self._at += len(word)

    def _until(self, mark: str, most: int | None = None) -> Generator[None, None, str]:
        """Return the text before a mark, at most `most` characters, and skip the mark."""
        word, begin = mark.split()[0], self._at
        end = None if most is None else begin + most + len(word)
        while (place := self._text.find(word, begin, end)) < 0:
            if self._is_over or (end is not None and len(self._text) >= end):
                self._at = len(self._text) if end is None else begin
                raise _BrokenCall
            yield
        self._at = place
        yield from self._expect(mark)
        return self._text[begin:place]

    def _word(self) -> Generator[None, None, str]:
        """Return a name."""
        yield from self._space()
        begin = self._at
        while NAME.fullmatch((yield from self._peek(1))):
            self._at += 1
        return self._text[begin : self._at]

    def _literal(self, quotes: str, *, sends: bool = False) -> Generator[None, None, str]:
        """Return the text of a value: to its closing bracket or quote, else to `,` or a bracket.

        sends: pass on what comes as arguments of the call.
        """
        yield from self._space()
        begin = sent = self._at
        depth, quote, is_escaped = 0, "", False
        while True:
            if self._at == len(self._text):
                if sends:
                    self._send(self._text[sent : self._at])
                    sent = self._at
                if self._is_over:
                    raise _BrokenCall
                yield
                continue
            char = self._text[self._at]
            if quote:
                quote = "" if char == quote and not is_escaped else quote
                is_escaped = char == "\\" and not is_escaped
            elif depth == 0 and char in ",)]}":
                break
            elif char in quotes:
                quote = char
            else:
                depth += (char in "{[(") - (char in ")]}")
            self._at += 1
            if depth == 0 and not quote and char in "]}" + quotes:
                break
        if sends:
            self._send(self._text[sent : self._at])
        return self._text[begin : self._at]

    # calls

    def _begin(self, name: object) -> None:
        is_name = isinstance(name, str) and NAME.fullmatch(name)
        if not is_name or (self._functions and name not in self._functions):
            raise _BrokenCall
        self._open = self._fmt.new_id()
        self._events.append(CallBegin(self._open, str(name)))

    def _send(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._open, text))

    def _end(self) -> None:
        """End a call; what breaks later leaves it valid."""
        self._events.append(CallEnd(self._open))
        self._open, self._from = "", self._at

    def _json(self, *, sends: bool = False) -> Generator[None, None, Any]:
        text = yield from self._literal('"', sends=sends)
        try:
            return json_value(text)
        except ValueError as error:
            raise _BrokenCall from error

    def _sent_json(self) -> Generator[None, None, Any]:
        """Read the arguments, an object, and pass them on as they come."""
        yield from self._space()
        if (yield from self._peek(1)) != "{":
            raise _BrokenCall
        return (yield from self._json(sends=True))

    def _object(self) -> Reading:
        """Read `{"name": …, "arguments": {…}}`, keys in any order."""
        yield from self._expect("{")
        found, is_first = dict[str, Any](), True
        while not (yield from self._is_next("}")):
            if not is_first:
                yield from self._expect(",")
            key, is_first = (yield from self._json()), False
            if not isinstance(key, str) or key in found:
                raise _BrokenCall
            yield from self._expect(":")
            name, is_object = found.get(self._fmt.name_key), (yield from self._is_next("{"))
            if key == self._fmt.arguments_key and is_object and name and not self._open:
                self._begin(name)
                found[key] = yield from self._sent_json()
            else:
                found[key] = yield from self._json()
        yield from self._expect("}")
        if not self._open:
            self._begin(found.get(self._fmt.name_key))
            given = found.get(self._fmt.arguments_key) or {}
            self._send(_object_text(given))
        self._end()

    def _objects(self) -> Reading:
        yield from self._expect("[")
        while True:
            yield from self._object()
            if not (yield from self._is_next(",")):
                break
            yield from self._expect(",")
        yield from self._expect("]")
        self._from = self._at

    def _name_json(self) -> Reading:
        name = yield from self._word()
        if not name or (self._functions and name not in self._functions):
            raise _BrokenCall
        yield from self._until(self._fmt.name_end, MOST_BETWEEN)
        self._begin(name)
        yield from self._sent_json()
        self._end()
        yield from self._leave(self._fmt.call_end)

    def _leave(self, mark: str) -> Reading:
        if mark and (yield from self._is_next(mark)):
            yield from self._expect(mark)
            self._from = self._at

    def _parameters(self) -> Reading:
        fmt = self._fmt
        yield from self._expect(fmt.name_begin)
        name = yield from self._word()
        yield from self._expect(fmt.name_end)
        self._begin(name)
        known = self._functions.get(name, {}).get("properties", {})
        keys = set[str]()
        while not (yield from self._is_next(fmt.call_end or fmt.end)):
            yield from self._expect(fmt.key_begin)
            key = yield from self._until(fmt.key_end)
            text = yield from self._until(fmt.value_end)
            text = text.removeprefix("\n") if fmt.key_end.endswith("\n") else text
            text = text.removesuffix("\n") if fmt.value_end.startswith("\n") else text
            try:
                value = parameter_value(text, known.get(key))
            except ValueError as error:
                raise _BrokenCall from error
            self._add(keys, key, value)
        if fmt.call_end:
            yield from self._expect(fmt.call_end)
        self._send("}" if keys else "{}")
        self._end()

    def _lines(self) -> Reading:
        """Read `f(key=value, …)`: a list of them, or a line each."""
        brackets = self._fmt.brackets
        if brackets:
            yield from self._expect("[")
        while True:
            yield from self._python_call()
            yield from self._space()
            if brackets:
                if not (yield from self._is_next(",")):
                    break
                yield from self._expect(",")
            elif (yield from self._is_next(self._fmt.end)) or not (yield from self._peek(1)):
                break
        if brackets:
            yield from self._expect("]")
            self._from = self._at

    def _python_call(self) -> Reading:
        name = yield from self._word()
        yield from self._expect("(")
        self._begin(name)
        keys = set[str]()
        while not (yield from self._is_next(")")):
            if keys:
                yield from self._expect(",")
            key = yield from self._word()
            yield from self._expect("=")
            text = yield from self._literal("\"'")
            try:
                self._add(keys, key, python_value(text))
            except ValueError as error:
                raise _BrokenCall from error
        yield from self._expect(")")
        self._send("}" if keys else "{}")
        self._end()

    def _add(self, keys: set[str], key: str, value: object) -> None:
        """Pass on an argument; one that comes twice breaks the call."""
        if key in keys or not key:
            raise _BrokenCall
        pair = f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        self._send(f"{', ' if keys else '{'}{pair}")
        keys.add(key)


def _object_text(given: object) -> str:
    """Return arguments as JSON text; some models write it as a string once more."""
    try:
        value = json_value(given) if isinstance(given, str) else given
    except ValueError as error:
        raise _BrokenCall from error
    if not isinstance(value, dict):
        raise _BrokenCall
    return given if isinstance(given, str) else json.dumps(value, ensure_ascii=False)


def _begun(text: str, mark: str) -> int:
    """Return how many characters at the end of a text begin a mark."""
    counts = range(min(len(text), len(mark) - 1), 0, -1)
    return next((count for count in counts if text.endswith(mark[:count])), 0)
