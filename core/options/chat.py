"""Options of a chat: the prompt format, what the model remembers, and what is shown."""

from typing import Literal

from pydantic import Field

from exl2flow.core.options.config import Options


class ChatOptions(Options):
    """What `exl2flow chat` takes besides settings of the sampler, the model and its cache."""

    format: str | None = Field(None, description="prompt format: a name, or a file with a template")
    system: str | None = Field(None, description="system prompt")
    no_system: bool = Field(False, description="no system prompt, not even the format's own")
    user_name: str = Field("User", min_length=1, description="your name; format `raw` uses it")
    bot_name: str = Field("Assistant", min_length=1, description="the model's name, likewise")
    max_answer: int = Field(1000, ge=1, description="tokens of an answer at most; `/more` goes on")
    reserve: int = Field(250, ge=1, description="tokens that the context keeps free for an answer")
    amnesia: bool = Field(False, description="forget each turn when the next one begins")
    keep_thinking: bool = Field(False, description="keep earlier thoughts in the context")
    thinking: Literal["show", "fold", "hide"] = Field(
        "show", description="whether thoughts are shown: show, fold or hide"
    )
    plain: bool = Field(False, description="show answers as they are, not as Markdown")
    stats: bool = Field(
        False, description="show tokens, times and acceptance rate after each answer"
    )
    seed: int | None = Field(None, ge=0, description="seed for sampling")
    greedy: bool = Field(False, description="always take the likeliest token")
