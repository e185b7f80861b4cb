"""`exl2flow serve`: answer requests over HTTP with one model; needs no Prefect."""

import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.serving import ServeOptions
from exl2flow.flows.cli.console import say
from exl2flow.flows.cli.options import ModelFolder, with_options

if TYPE_CHECKING:
    from exl2flow.inference import PromptCache
    from exl2flow.serve.engine import Engine

BACKLOG = 256  # connections that are not accepted yet
KEY_VARIABLE = "EXL2FLOW_API_KEY"
EXAMPLES = (
    "exl2flow serve ./Llama-3.2-1B-4.0bpw",
    "exl2flow serve ./model --slots 32 --cache q6 --draft ./smaller-model",
    f"{KEY_VARIABLE}=… exl2flow serve ./model --host 0.0.0.0 --allow-host gpu.lan",
)


@with_options()
def serve(model: ModelFolder, *, options: ServeOptions) -> None:
    """Serve a model over HTTP, as OpenAI's API does. (`exl2flow server` runs conversions.)

    Requests go to http://127.0.0.1:5000/v1; without a key in the environment, EXL2FLOW_API_KEY, or
    in the file of --keys, only from this machine.
    """
    from exl2flow.flows.cli.loading import prompt_cache  # imports torch
    from exl2flow.serve.app import create_app
    from exl2flow.serve.guard import is_loopback, key_of, read_keys
    from exl2flow.serve.models import Models
    from exl2flow.serve.running import run

    if options.swap and options.models is None:
        raise ConfigError("`--swap` goes with `--models`")
    keys = () if options.keys is None else read_keys(options.keys)
    if given := os.environ.get(KEY_VARIABLE):
        keys = (*keys, key_of(given, "environment"))
    if not keys and not is_loopback(options.host):
        why = f"`--host` is {options.host}, which others can reach"
        raise ConfigError(f"{why}; set {KEY_VARIABLE} or give `--keys`")
    with _listening(options) as listener:
        keep = prompt_cache(options)

        def make(folder: Path) -> "Engine":
            is_first = folder.resolve() == model.resolve()
            return _engine(folder, options if is_first else _of_any(options), keep)

        models = Models(make(model), make)  # nothing else holds the engine, which may be freed
        _log_requests(options)
        listener.listen(BACKLOG)
        say(f"serving on http://{options.host}:{listener.getsockname()[1]}/v1")
        run(create_app(models, keys=keys), models, listener)


def _of_any(options: ServeOptions) -> ServeOptions:
    """Return options without those that were given for the first model."""
    names = "draft lora format tool_format rope_scale rope_alpha rope_yarn"
    fields = ServeOptions.model_fields
    own = {name: fields[name].get_default(call_default_factory=True) for name in names.split()}
    return options.model_copy(update=own)


def _engine(model: Path, options: ServeOptions, keep: "PromptCache | None") -> "Engine":
    """Return the engine of a model, loaded and warm."""
    from exl2flow.flows.cli.loading import load, load_draft
    from exl2flow.flows.cli.options.chat import of_model
    from exl2flow.inference import Adapter, Generator
    from exl2flow.inference.chat import choose_format
    from exl2flow.serve.engine import Engine

    began = time.monotonic()
    loaded = load(model, options, slots=options.slots, tokens=options.tokens)
    draft = load_draft(options, loaded)
    fmt, why = choose_format(model, loaded.tokenizer, options.format)
    is_known = bool(options.format is not None or fmt.marks or fmt.tokens is not None)

    def make() -> Generator:
        return Generator(
            loaded,
            cache=options.cache,
            tokens=options.tokens,
            slots=options.slots,
            draft=draft,
            keep=keep,
        )

    engine = Engine(
        loaded,
        make,
        options,
        fmt=fmt if is_known else None,
        defaults=of_model(model),
        adapters=tuple(Adapter.load(folder, loaded) for folder in options.lora),
    )
    engine.start()
    engine.load_seconds = time.monotonic() - began
    if not is_known:
        say("warning: no chat template, only completions; `--format` names one", style="yellow")
    for warning in engine.warnings:
        say(f"warning: {warning}", style="yellow")
    say(f"{engine.name}; {why}; tool calls as `{engine.tool_format.name}`", style="dim")
    return engine


class _Lines(logging.Formatter):
    """Writes a record as JSON, with the names of what its message shows."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        told = record.args if isinstance(record.args, dict) else {"message": super().format(record)}
        return json.dumps({"time": self.formatTime(record), "level": record.levelname, **told})


def _log_requests(options: ServeOptions) -> None:
    """Show a line per request on stderr."""
    logger, handler = logging.getLogger("exl2flow.serve"), logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(message)s")
    handler.setFormatter(_Lines() if options.log_json else plain)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _listening(options: ServeOptions) -> socket.socket:
    """Return a socket at the address, which takes connections later.

    Raises:
        ConfigError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # without the protocol, asyncio leaves Nagle's algorithm on, which delays answers by 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        where, why = f"{options.host}:{options.port}", error.strerror or error
        raise ConfigError(f"cannot listen on {where}: {why}; choose another `--port`") from error
    return listener
