"""Options of `exl2flow serve`: the address, the model, the limits."""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from exl2flow.core.options.base import Duration, Option, Options, Size
from exl2flow.core.options.generation import SlotOptions

LISTEN: Final = "Running"
KEY_VARIABLE: Final = "EXL2FLOW_API_KEY"  # of the environment


class ServeOptions(SlotOptions):
    """Options of `exl2flow serve`.

    Only the file of `--config` has the tables: `defaults` and `forced`, settings of the sampler by
    the names of a request's fields, and `aliases`, further names for the model.
    """

    model: Annotated[Path | None, Option("MODEL", is_argument=True)] = Field(
        default=None,
        description="model folder, EXL2 or plain, or the name of an EXL2 model on the Hub",
    )
    host: Annotated[str, Option("ADDRESS", LISTEN)] = Field(
        default="127.0.0.1",
        description="interface to listen on; another one needs a key; unix:PATH: a socket that "
        "only this user reaches",
    )
    port: Annotated[int, Option("PORT", LISTEN)] = Field(
        default=5000, ge=0, le=65535, description="port to listen on; 0: a free one"
    )
    keys: Annotated[Path | None, Option("FILE", LISTEN)] = Field(
        default=None,
        description="TOML file with a table `key` per client, which has its `name` and its `key` "
        "or `sha256`; empty: EXL2FLOW_API_KEY, else no key",
    )
    models: Annotated[Path | None, Option("FOLDER", LISTEN)] = Field(
        default=None,
        description="folder with further models, a folder each, which can replace this one",
    )
    also: Annotated[list[Path], Option("MODEL", LISTEN)] = Field(
        default=[],
        description="further model, a folder or a name on the Hub, which can replace this one",
    )
    swap: Annotated[bool, Option(panel=LISTEN)] = Field(
        default=False, description="load the model of `models` or `also` that a request names"
    )
    swap_wait: Annotated[Duration, Option("SECONDS", LISTEN, rare=True)] = Field(
        default=30.0,
        ge=0,
        description="time that running answers have when another model is loaded",
    )
    unload_after: Annotated[Duration | None, Option("MINUTES", LISTEN, rare=True)] = Field(
        default=None,
        gt=0,
        description="free the model when nobody has used it that long; empty: never",
    )
    loras: Annotated[Path | None, Option("FOLDER", LISTEN, rare=True)] = Field(
        default=None, description="folder with adapters that an admin's request may load"
    )
    allow_host: Annotated[list[str], Option("NAME", LISTEN, rare=True)] = Field(
        default=[], description="further name by which clients reach this server"
    )
    origin: Annotated[list[str], Option("URL", LISTEN, rare=True)] = Field(
        default=[], description="web page that may send requests, such as http://localhost:8080"
    )
    open_metrics: Annotated[bool, Option(panel=LISTEN, rare=True)] = Field(
        default=False, description="answer /metrics and /v1/status without a key"
    )
    no_page: Annotated[bool, Option(panel=LISTEN, rare=True)] = Field(
        default=False, description="serve no page at /"
    )
    log_json: Annotated[bool, Option(panel=LISTEN, rare=True)] = Field(
        default=False, description="write the log as JSON, an object per line"
    )
    drain: Annotated[Duration, Option("SECONDS", LISTEN, rare=True)] = Field(
        default=30.0, ge=0, description="time that running answers have after SIGTERM"
    )
    waiting: Annotated[int, Option("N", LISTEN, rare=True)] = Field(
        default=64,
        ge=0,
        description="requests that may wait for a slot; further ones get status 429",
    )
    wait_seconds: Annotated[Duration, Option("SECONDS", LISTEN, rare=True)] = Field(
        default=600.0, gt=0, description="time that a request may wait; then it gets status 503"
    )
    isolate: Annotated[bool, Option(panel=LISTEN, rare=True)] = Field(
        default=False,
        description="let no key find out what others have asked: keys share no cached prompts",
    )
    strict: Annotated[bool, Option(panel=LISTEN)] = Field(
        default=False, description="refuse unknown fields and tools that the template does not show"
    )
    strict_names: Annotated[bool, Option(panel=LISTEN)] = Field(
        default=False,
        description="refuse other models' names, instead of answering with this model",
    )
    format: Annotated[str | None, Option("NAME|FILE", "Conversation")] = Field(
        default=None,
        description="prompt format: a name, or a file with a template; empty: the model's "
        "template, else by its vocabulary",
    )
    tool_format: Annotated[str | None, Option("NAME", "Conversation", rare=True)] = Field(
        default=None, description="format of tool calls; empty: by the template"
    )
    tool_grammar: Annotated[Literal["on", "off"], Option("on|off", "Conversation", rare=True)] = (
        Field(default="on", description="force tool calls to be valid; off: only read them")
    )
    reasoning_field: Annotated[
        Literal["reasoning_content", "reasoning", "both", "inline"],
        Option("NAME", "Conversation", rare=True),
    ] = Field(
        default="reasoning_content",
        description="where thoughts are: reasoning_content, reasoning, both, or inline in the text",
    )
    trust_marks: Annotated[bool, Option(panel="Conversation", rare=True)] = Field(
        default=False, description="read special tokens that users spell as such"
    )
    max_answer: Annotated[int | None, Option("N", "Stopping")] = Field(
        default=None, ge=1, description="tokens of an answer at most; empty: what fits"
    )
    defaults: dict[str, Any] = Field(default={})
    forced: dict[str, Any] = Field(default={})
    aliases: dict[str, str] = Field(default={})


class SoakOptions(Options):
    """Options of `exl2flow soak` besides those of the server."""

    turns: Annotated[int, Option("N", LISTEN)] = Field(
        default=100, ge=1, description="turns to run"
    )
    memory: Annotated[Size | None, Option("SIZE", LISTEN)] = Field(
        default=None,
        description="memory of the GPU that is left to the server, as 24GB: another process holds "
        "the rest; empty: what is free",
    )
