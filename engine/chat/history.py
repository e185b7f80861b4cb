"""A conversation's turns, and the ids that a model reads before it answers the last one.

Answers keep the ids that were generated. The template renders the conversation with a marker in
place of each answer; the text between markers is encoded, and the ids are put where markers stand,
so that the cache holds all that was read or generated before. Where the template changes an
answer, it gets the text, which is encoded.
"""

import re
import secrets
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import groupby, takewhile
from typing import Any, NamedTuple

from exl2flow.core.errors import ContextOverflow
from exl2flow.core.requests.conversation import Answer, PromptFormat, Turn
from exl2flow.model import ChatTemplate, Message, Tokenizer
from exl2flow.model.text.thoughts import first_of_answer

SEGMENTS = 4096  # encoded texts between answers that are kept
BOS, END, CUT = "bos", "end", "cut"  # instead of a number in a marker
PLAIN = ("user", "tool", "function")  # whose special tokens are text
ADVICE = "choose another format, or change the system prompt"


class Context(NamedTuple):
    """Token ids of a conversation, as far as it fits.

    opened: whether it ends in the mark that begins thoughts; first: the first turn that fits; cut:
    characters of the last message that do not.
    """

    ids: list[int]
    opened: bool
    first: int
    cut: int


class Reader:
    """Writes conversations in a format, as token ids."""

    def __init__(
        self, fmt: PromptFormat, tokenizer: Tokenizer, names: tuple[str, str], *, now: datetime
    ) -> None:
        """Compile the format's template; `now` is its date, the same for all turns.

        Raises:
            ChatTemplateError: it is not Jinja.
        """
        self.format, self._tokenizer, self._now = fmt, tokenizer, now
        self._secret = f"x{secrets.token_hex(12)}x"
        self._marker = re.compile(rf"{self._secret}(\d+|{BOS}|{END}|{CUT})e")
        self.template = ChatTemplate(
            fmt.template, special_tokens=self._special_tokens(), origin=fmt.file, advice=ADVICE
        )
        self._names = {"user_name": names[0], "bot_name": names[1]}
        self._encoded = lru_cache(SEGMENTS)(lambda s: tokenizer.encode(s, special=fmt.special))
        marks = fmt.thinking
        spelled = "" if marks is None else marks.open
        decoded = tokenizer.decode(tokenizer.encode(spelled, special=True))
        self.hides_marks = spelled not in decoded
        self.stops = self._stops(names[0])

    def _stops(self, user: str) -> tuple[int | str, ...]:
        """Return the stops of an answer: ids, the model's EOS ids among them, then strings."""
        spellings = {"user": user, "USER": user.upper(), "lower": user.lower(), "initial": user[:1]}
        strings = list[str]()
        for text in self.format.stop_strings:
            for name, spelling in spellings.items():
                text = text.replace(f"{{{name}}}", spelling)
            strings.append(text)
        tokens = map(self._tokenizer.backend.token_to_id, (*self.format.stop_tokens, *strings))
        ids = [*self._tokenizer.eos_token_ids, *(i for i in tokens if i is not None)]
        return (*dict.fromkeys(ids), *dict.fromkeys(strings))

    def _special_tokens(self) -> dict[str, str]:
        """Return the template's variables; BOS is a marker where text cannot spell it."""
        if self.format.tokens is not None:
            return dict(self.format.tokens)
        ids = {"bos_token": self._tokenizer.bos_token_id, "eos_token": self._tokenizer.eos_token_id}
        names = {
            name: "" if i is None else self._tokenizer.backend.id_to_token(i) or ""
            for name, i in ids.items()
        }
        if not self.format.special and ids["bos_token"] is not None:
            names["bos_token"] = self._mark(BOS)
        return names

    def _mark(self, of: object) -> str:
        return f"{self._secret}{of}e"

    def fit(
        self, system: str, turns: Sequence[Turn], *, room: int, keep_thinking: bool = False
    ) -> Context:
        """Return the ids before the next token of the last turn's answer, at most `room`.

        The oldest turns go first, then the beginning of the last message, of which the answer
        under way may displace as much as leaves it half of the room, then its own beginning.

        Raises:
            ContextOverflow: no room even without a message.
            ChatTemplateError: the template refuses the conversation, or fails.
        """
        last = turns[-1]
        answer, cut = last.current.ids, last.cut
        contexts: dict[int, tuple[list[int], bool]] = {}

        def fits(first: int) -> bool:
            contexts[first] = self.read(system, turns[first:], cut=cut, keep_thinking=keep_thinking)
            return len(contexts[first][0]) + len(answer) <= room

        first = 0 if fits(0) else 1 + bisect_left(range(1, len(turns)), True, key=fits)
        if first < len(turns):
            ids, opened = contexts[first]
            return Context(ids + answer, opened, first, cut)
        first, least = len(turns) - 1, min(len(answer), room // 2)
        ids, opened = contexts[first]
        while (excess := len(ids) + least - room) > 0 and cut < len(last.user):
            rest = self.ids_of(last.user[cut:], special=self.format.special)[excess:]
            cut = max(cut + 1, len(last.user) - len(self._tokenizer.decode(rest, special=True)))
            ids, opened = self.read(system, [last], cut=cut)
        if len(ids) > room or (answer and len(ids) == room):
            raise ContextOverflow(
                f"the system prompt and the marks of a turn take {len(ids)} tokens, there is room "
                f"for {room}; shorten the system prompt"
            )
        begin = max(0, len(answer) + len(ids) - room)
        return Context(ids + answer[begin:], opened, first, cut)

    def read(
        self, system: str, turns: Sequence[Turn], *, cut: int, keep_thinking: bool = False
    ) -> tuple[list[int], bool]:
        """Return the ids up to where the last answer begins, and whether thoughts are begun."""
        answers = [_Given.of(turn.current, self, keep_thinking) for turn in turns[:-1]]
        users = [turn.user[turn.cut :] for turn in turns[:-1]] + [turns[-1].user[cut:]]
        marks = [self._mark(number) for number in range(len(answers))]
        text = self._rendered(system, users, marks)
        if changed := self._changed(text, system, users, [given.text for given in answers]):
            shown = [a.text if i in changed else marks[i] for i, a in enumerate(answers)]
            text = self._rendered(system, users, shown)
        return self._joined(self._marker.split(text), answers), self._opens(text)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        goes_on: bool = False,
        trusts: bool = False,
    ) -> tuple[list[int], bool]:
        """Return the ids of messages as `ChatTemplate.render` takes them, and whether they think.

        Args:
            messages: the turns; contents are text.
            tools: the functions that the model may call.
            variables: further names of the template.
            goes_on: the answer continues the last message.
            trusts: read special tokens that users' and tools' texts spell as such.

        Raises:
            ChatTemplateError, ConfigError: what `ChatTemplate.render` refuses.
        """
        shown = [m if trusts else self._as_text(m) for m in messages]
        if goes_on:
            shown[-1] = {**shown[-1], "content": f"{shown[-1]['content']}{self._mark(END)}"}
        text = self.template.render(
            shown,
            tools=tools,
            add_generation_prompt=not goes_on,
            now=self._now,
            variables={**self._names, **(variables or {})},
        )
        text = text.partition(self._mark(END))[0]
        return self._joined(self._marker.split(text), ()), self._opens(text)

    def _as_text(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put a marker within each special token that a message of a user or a tool spells."""
        content = message.get("content")
        if message.get("role") not in PLAIN or not isinstance(content, str):
            return message
        cut = self._spelled.sub(lambda found: f"{found[0]}{self._mark(CUT)}", content)
        return {**message, "content": cut}

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        """Matches first characters of names of added tokens, which the backend finds in any text.

        Names that begin alike share that part of the pattern, so a search takes the time of a text,
        not that of a text for each name.
        """
        added = self._tokenizer.backend.get_added_tokens_decoder().values()
        rests = dict[str, list[str]]()
        for name in sorted({t.content for t in added if len(t.content) > 1}):
            rests.setdefault(name[0], []).append(name[1:])
        firsts = [f"{re.escape(first)}(?={any_of(names)})" for first, names in rests.items()]
        return re.compile("|".join(firsts) or "(?!)")

    def _opens(self, text: str) -> bool:
        thinking = self.format.thinking
        return thinking is not None and text.rstrip().endswith(thinking.open)

    def _joined(self, parts: list[str], answers: Sequence["_Given"]) -> list[int]:
        """Encode a rendered conversation: texts at even indexes, names of markers at odd ones."""
        ends_in_space, ids, ending = parts[-1].endswith(" "), list[int](), ""
        for segment, name in zip(parts[::2], [*parts[1::2], ""], strict=True):
            given = answers[int(name)] if name.isdigit() else None
            segment, ending, opening = ending + segment, "", list[int]()
            if given is not None:
                segment, opening = given.behind(segment, ends_in_space=ends_in_space)
                ending = given.ending
            ids += self._encoded(segment) if segment else []
            if given is not None:
                ids += opening + given.ids
            elif name == BOS and self._tokenizer.bos_token_id is not None:
                ids.append(self._tokenizer.bos_token_id)
        return ids

    def _rendered(self, system: str, users: Sequence[str], answers: Sequence[str]) -> str:
        """Render a conversation, in another way where the template refuses it as it is.

        Raises:
            ChatTemplateError: the template refuses the conversation, or fails.
        """
        messages = [Message(role="system", content=system)] if system else []
        for index, user in enumerate(users):
            messages.append(Message(role="user", content=user))
            if index < len(answers):
                messages.append(Message(role="assistant", content=answers[index]))
        return self.template.render(
            messages, add_generation_prompt=True, now=self._now, variables=self._names
        )

    def _changed(
        self, marked: str, system: str, users: Sequence[str], texts: Sequence[str]
    ) -> set[int]:
        """Return the answers whose text the template changes, by comparing with their markers."""
        changed, groups = set[int](), [range(len(texts))] if texts else []

        def shown(group: Collection[int]) -> list[str]:
            return [t if i in group else self._mark(i) for i, t in enumerate(texts)]

        while groups:
            group = groups.pop()
            inside = shown(group)

            def put(match: re.Match[str], inside: list[str] = inside) -> str:
                return match[0] if match[1] == BOS else inside[int(match[1])]

            if self._rendered(system, users, inside) == self._marker.sub(put, marked):
                continue
            if len(group) == 1:
                changed.update(group)
            else:
                half = len(group) // 2
                groups += [group[:half], group[half:]]
        return changed

    def complete(self, answer: Answer, *, opened: bool) -> None:
        """Find the first id of an answer after its thoughts."""
        marks = self.format.thinking
        answer.first = first_of_answer(answer.ids, marks, self._tokenizer, opened=opened)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of an answer's ids, as it is streamed."""
        return self._tokenizer.decode(ids, special=self.hides_marks)

    def ids_of(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text within an answer."""
        return self._tokenizer.encode(text, special=special)

    def begins_with_space(self, ids: Sequence[int]) -> bool:
        """Return whether the text of ids begins with a space, where it follows other text."""
        return bool(ids) and self._tokenizer.pieces[ids[0]].startswith(" ")


class _Given(NamedTuple):
    """An answer in a context: its ids, its text for the template, and text to put after it.

    mark: begins thoughts, which the answer has (`opening`: ids of the mark, if the prompt had it)
    or does not have (None). spaced: whether its ids have the space before its text, if any.
    """

    ids: list[int]
    text: str
    ending: str
    mark: str
    opening: list[int] | None
    spaced: bool

    @classmethod
    def of(cls, answer: Answer, reader: Reader, keep_thinking: bool) -> "_Given":
        marks, ids, text = reader.format.thinking, answer.ids[answer.first :], answer.text
        mark, opening = "" if marks is None else marks.open, None
        if keep_thinking and answer.first:
            ids, text, opening = answer.ids, reader.text_of(answer.ids), list[int]()
            if not text.lstrip().startswith(mark):  # the prompt has begun the thoughts
                opening, text = reader.ids_of(f"{mark}\n", special=True), f"{mark}\n{text}"
        closing = reader.format.ending
        ending = "" if answer.text.endswith(closing) else closing
        spaced = bool(answer.drawn) or reader.begins_with_space(ids)
        return cls(ids, text.strip(), ending, mark, opening, spaced)

    def behind(self, segment: str, *, ends_in_space: bool) -> tuple[str, list[int]]:
        """Return the text before this answer as the model read it, and ids after that text."""
        if self.mark and segment.rstrip().endswith(self.mark):
            if self.opening is None:
                return segment.rstrip().removesuffix(self.mark), []
            return segment, []
        if self.spaced and not ends_in_space:
            segment = segment.removesuffix(" ")
        return segment, self.opening or []


def any_of(texts: Sequence[str]) -> str:
    """Return a pattern that matches where one of sorted texts begins, without repeating prefixes.

    Of texts that begin with another one, that one is enough.
    """
    if not texts[0]:
        return ""
    groups = [[*group] for _, group in groupby(texts, key=lambda text: text[0])]
    parts = list[str]()
    for group in groups:
        pairs = zip(group[0], group[-1], strict=False)
        size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        parts.append(re.escape(group[0][:size]) + any_of([text[size:] for text in group]))
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"
