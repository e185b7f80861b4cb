"""Options of a chat: the prompt format, what the model remembers, and what is shown."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from exl2flow.core.options.base import Option, Options
from exl2flow.core.options.generation import DrawOptions

PROFILES = "chat.toml"  # in the folder of our configuration


class ChatFiles(Options):
    """Which conversation a chat goes on with, and which profile it has."""

    resume: Annotated[bool, Option(panel="Files")] = Field(
        default=False,
        description="go on with the last conversation with this model, or that of --conversation",
    )
    conversation: Annotated[Path | None, Option("FILE", "Files")] = Field(
        default=None,
        description="file in which the conversation is kept, after each turn; empty: one per model",
    )
    profile: Annotated[str | None, Option("NAME", "Files")] = Field(
        default=None,
        description=f"options from the table NAME of ~/.config/exl2flow/{PROFILES}; empty: the one "
        "remembered",
    )
    remember: Annotated[bool, Option(panel="Files")] = Field(
        default=False, description="with --profile: use it for this model from now on"
    )


class ChatOptions(DrawOptions):
    """Options of `exl2flow chat` besides those of the sampler, the model and its cache."""

    format: Annotated[str | None, Option("NAME|FILE", "Conversation")] = Field(
        default=None,
        description="prompt format: a name, or a file with a template; empty: the model's "
        "template, else by its vocabulary",
    )
    system: Annotated[str | None, Option("TEXT", "Conversation")] = Field(
        default=None, description="system prompt; empty: the format's"
    )
    no_system: Annotated[bool, Option(panel="Conversation")] = Field(
        default=False, description="no system prompt, not even the format's own"
    )
    user_name: Annotated[str, Option("NAME", "Conversation")] = Field(
        default="User", min_length=1, description="your name; format `raw` uses it"
    )
    bot_name: Annotated[str, Option("NAME", "Conversation")] = Field(
        default="Assistant", min_length=1, description="the model's name; format `raw` uses it"
    )
    max_answer: Annotated[int, Option("N", "Conversation")] = Field(
        default=1000, ge=1, description="tokens of an answer at most; `/more` goes on"
    )
    reserve: Annotated[int, Option("N", "Conversation")] = Field(
        default=250, ge=1, description="tokens that the context keeps free for an answer"
    )
    amnesia: Annotated[bool, Option(panel="Conversation")] = Field(
        default=False, description="forget each turn when the next one begins"
    )
    keep_thinking: Annotated[bool, Option(panel="Conversation")] = Field(
        default=False, description="keep earlier thoughts in the context"
    )
    thinking: Annotated[
        Literal["show", "fold", "hide"], Option("show|fold|hide", "What is shown")
    ] = Field(default="show", description="whether thoughts are shown: show, fold or hide")
    plain: Annotated[bool, Option(panel="What is shown")] = Field(
        default=False, description="show answers as they are, not as Markdown"
    )
    stats: Annotated[bool, Option(panel="What is shown")] = Field(
        default=False, description="show tokens, times and acceptance rate after each answer"
    )
