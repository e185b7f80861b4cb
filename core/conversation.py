"""The file of a conversation: messages in the usual form, and what it takes to go on with it."""

from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from exl2flow.core.errors import ConfigError
from exl2flow.core.options import Options

SCHEMA = 1


class SavedAnswer(Options):
    """An answer: its text, the thoughts before it, and the ids of both as they were generated."""

    content: str
    thinking: str = ""
    ids: list[int] = []
    first: int = Field(0, ge=0)
    seed: int = 0
    drawn: int = Field(0, ge=0)
    ended: bool = True


class SavedMessage(SavedAnswer):
    """A message: of the user with `dropped` and `cut`, or an answer with its alternatives."""

    role: Literal["system", "user", "assistant"]
    dropped: bool = False
    cut: int = Field(0, ge=0)
    alternatives: list[SavedAnswer] = []


class SavedFormat(Options):
    """A prompt format: its name if it is one of ours, else all of it."""

    name: str
    template: str | None = None
    tokens: dict[str, str] | None = None
    stop_tokens: tuple[str, ...] = ()
    stop_strings: tuple[str, ...] = ()
    thinking: tuple[str, str, str] | None = None
    system: str = ""
    special: bool = True
    ending: str = ""


class Conversation(Options):
    """A conversation as a file holds it."""

    conversation: Literal[1] = SCHEMA  # the schema
    model: str = ""
    fingerprint: str = ""
    format: SavedFormat
    started: datetime
    seed: int
    asked: int = Field(0, ge=0)
    settings: dict[str, Any] = {}
    max_answer_tokens: int = Field(1000, ge=1)
    reserve: int = Field(250, ge=1)
    bans: list[str] = []
    amnesia: bool = False
    keep_thinking: bool = False
    names: tuple[str, str] = ("User", "Assistant")
    has_own_system: bool = False  # else the system prompt is the format's
    left_out: list[str] = []  # what a file cannot hold
    messages: list[SavedMessage] = []

    @field_validator("messages")
    @classmethod
    def _in_order(cls, messages: list[SavedMessage]) -> list[SavedMessage]:
        """Refuse messages that are not an optional system prompt and then pairs."""
        roles = [message.role for message in messages]
        roles = roles[1:] if roles[:1] == ["system"] else roles
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError("after the system prompt, messages and answers must alternate")
        return messages


def read_conversation(path: Path) -> Conversation:
    """Read the file of a conversation.

    Raises:
        ConfigError: it cannot be read, is damaged, or holds something else.
    """
    try:
        return Conversation.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read `{path}`: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"`{path}` holds no conversation, or a damaged one: "
            f"{f'`{where}`: ' if where else ''}{first['msg']}; give a file that was saved here"
        ) from error
