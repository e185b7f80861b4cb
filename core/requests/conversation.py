"""A conversation: its turns, the format it is written in, and the file that holds both."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.base import Options
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.images import refuse_images
from exl2flow.core.store.files import write_json


@dataclass(frozen=True, slots=True)
class Thinking:
    """Marks around a model's thoughts, which come before its answer.

    answer: what may begin an answer without thoughts, and is not part of it.
    """

    open: str
    close: str
    answer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """A prompt format: a template of conversations, and what ends an answer besides EOS ids.

    template: Jinja; file: where it is from, for messages.
    stop_tokens: end an answer as tokens, if the vocabulary has them.
    stop_strings: end an answer as text, and as tokens where the vocabulary has them. `{user}`,
        `{USER}`, `{lower}` and `{initial}` stand for the user's name in different spellings.
    marks: tokens by which a vocabulary is recognized; without any it never is.
    system: the system prompt if none is given; `{user}` and `{bot}` stand for the names.
    special: read special tokens spelled in the text as such; otherwise only BOS is one.
    ending: put behind an answer that does not end in it, before the conversation goes on.
    tokens: variables such as `bos_token`; None: those of the tokenizer.
    """

    name: str
    template: str = field(repr=False)
    file: Path
    stop_tokens: tuple[str, ...] = ()
    stop_strings: tuple[str, ...] = ()
    thinking: Thinking | None = None
    marks: tuple[str, ...] = ()
    system: str = ""
    special: bool = True
    ending: str = ""
    tokens: dict[str, str] | None = field(default=None, repr=False)


@dataclass(slots=True)
class Answer:
    """An answer of the model.

    ids: as they were generated, thoughts and marks included; text, thinking: as they were shown.
    first: how many ids come before the answer itself. seed, drawn: its draws, and how many it used.
    ended: whether it is complete.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    thinking: str = ""
    first: int = 0
    seed: int = 0
    drawn: int = 0
    ended: bool = False


@dataclass(slots=True)
class Turn:
    """A message and its answer.

    alternatives: earlier answers, the last one first to come back. dropped: the model did not
    read it for the last answer. cut: characters that it does not read, at the message's beginning.
    """

    user: str
    current: Answer = field(default_factory=Answer)
    alternatives: list[Answer] = field(default_factory=list)
    dropped: bool = False
    cut: int = 0

    @property
    def answer(self) -> str:
        """The text of the answer."""
        return self.current.text

    @property
    def thinking(self) -> str:
        """The model's thoughts before the answer."""
        return self.current.thinking

    @property
    def ids(self) -> list[int]:
        """The ids of the answer and its thoughts."""
        return self.current.ids

    @property
    def is_unanswered(self) -> bool:
        """Whether the turn has no answer yet, because the program ended first."""
        return not (self.current.ids or self.current.ended)


class _StoredMessage(Options):
    """A stored message: users' messages have `cut`, answers the fields of `Answer`."""

    role: Literal["system", "user", "assistant"]
    content: str
    dropped: bool = False
    cut: int = Field(default=0, ge=0)
    thinking: str = ""
    ids: tuple[int, ...] = ()
    first: int = 0
    seed: int = 0
    drawn: int = Field(default=0, ge=0)
    ended: bool = False
    alternatives: tuple[Answer, ...] = ()


class Conversation(Options):
    """A conversation as a file holds it."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    conversation: Literal[1] = 1  # the schema
    model: str
    fingerprint: str
    format: PromptFormat
    system: str | None  # None: the format's
    started: datetime
    seed: int
    asked: int = Field(default=0, ge=0)
    settings: SamplingSettings
    max_answer_tokens: int
    reserve: int
    bans: tuple[str, ...] = ()
    amnesia: bool = False
    keep_thinking: bool = False
    names: tuple[str, str] = ("User", "Assistant")
    left_out: tuple[str, ...] = ()  # what a file cannot hold
    messages: tuple[_StoredMessage, ...] = ()

    @field_validator("messages")
    @classmethod
    def _in_order(cls, messages: tuple[_StoredMessage, ...]) -> tuple[_StoredMessage, ...]:
        roles = [message.role for message in messages]
        roles = roles[1:] if roles[:1] == ["system"] else roles
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError("messages and answers must alternate behind the system prompt")
        return messages

    @cached_property
    def turns(self) -> list[Turn]:
        """The turns of the messages."""
        turns: list[Turn] = []
        for message in self.messages:
            if message.role == "user":
                turns.append(Turn(message.content, dropped=message.dropped, cut=message.cut))
            elif message.role == "assistant":
                turns[-1].alternatives = list(message.alternatives)
                stored = message.model_dump(include={each.name for each in fields(Answer)})
                stored |= {"text": message.content, "ids": list(message.ids)}
                turns[-1].current = Answer(**stored)
        return turns

    def forget_ids(self, encode: Callable[[str], list[int]]) -> None:
        """Replace the ids of answers, which are another model's, by those of their text."""
        for turn in self.turns:
            for answer in (turn.current, *turn.alternatives):
                answer.ids = encode(answer.text)
                answer.first = answer.drawn = turn.cut = 0

    @property
    def answers(self) -> list[Answer]:
        """All answers, earlier ones as well."""
        return [a for turn in self.turns for a in (turn.current, *turn.alternatives)]

    def has_ids_below(self, vocab_size: int) -> bool:
        """Return whether a vocabulary has the ids of all answers."""
        return all(
            0 <= a.first <= len(a.ids) and all(0 <= i < vocab_size for i in a.ids)
            for a in self.answers
        )

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all; messages leave out fields with default values.

        Only its owner can read it, unless it replaces a file that others can read. A link stays:
        the file that it names is replaced.

        Raises:
            WriteFailed: the disk is full or permissions forbid it.
        """
        messages = [message.model_dump(exclude_defaults=True) for message in self.messages]
        content = json.loads(self.model_dump_json(exclude={"messages"})) | {"messages": messages}
        write_json(Path(os.path.realpath(path)), content, is_private=True)

    @classmethod
    def read(cls, path: Path) -> "Conversation":
        """Read the file of a conversation.

        Raises:
            ConfigError: it cannot be read, is damaged, holds an image or something else.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read `{path}`: {error.strerror or error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the whole"
            refuse_images({where.rpartition(".")[2]: first["input"]}, f"`{path}`")
            raise ConfigError(
                f"`{path}` holds no conversation, or a damaged one: {where}: {first['msg']}; give "
                "a file that was saved as one"
            ) from error


def messages_of(system: str, turns: Sequence[Turn]) -> Iterator[_StoredMessage]:
    """Yield the messages of turns, after the system prompt if there is one."""
    if system:
        yield _StoredMessage(role="system", content=system)
    for turn in turns:
        yield _StoredMessage(role="user", content=turn.user, dropped=turn.dropped, cut=turn.cut)
        answer = asdict(turn.current)
        yield _StoredMessage(
            role="assistant",
            content=answer.pop("text"),
            dropped=turn.dropped,
            alternatives=tuple(turn.alternatives),
            **answer,
        )
