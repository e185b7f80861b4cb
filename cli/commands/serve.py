"""`exl2flow serve`: answer requests over HTTP with one model; needs no Prefect."""

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl2flow.cli.options import Values, local, settings_of, with_options
from exl2flow.cli.options.layers import as_toml, layered
from exl2flow.cli.output.console import say, tell
from exl2flow.core.errors import ConfigError
from exl2flow.core.model_name import name_of
from exl2flow.core.options.serving import KEY_VARIABLE, LISTEN, ServeOptions

if TYPE_CHECKING:
    from exl2flow.engine import PromptCache
    from exl2flow.engine.drafts import Drafter
    from exl2flow.serve.hosts.model_host import ModelHost
    from exl2flow.serve.hosts.reloading import Configuration

BACKLOG = 256  # connections that are not accepted yet
PREFIX = "EXL2FLOW_SERVE_"  # of environment variables, before the name of an option
CHUNKS = {"cpu": 512, "cuda": 2048}  # prompt tokens that others wait for, 0.1 s of a small model
EXAMPLES = (
    "exl2flow serve ./Llama-3.2-1B-4.0bpw",
    "exl2flow serve ./model --slots 32 --cache q6 --draft ./smaller-model",
    "exl2flow serve org/name:4.0 --also org/name:6.0 --swap",
    "exl2flow serve --config serve.toml",
    f"{KEY_VARIABLE}=… exl2flow serve ./model --host 0.0.0.0 --allow-host gpu.lan",
)


@with_options(*settings_of(ServeOptions))
def serve(
    *,
    values: Values,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML file with options as keys, and tables `defaults`, `forced` and `aliases`; "
            "options and environment variables EXL2FLOW_SERVE_NAME come first.",
            rich_help_panel=LISTEN,
        ),
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print all options as such a file, and stop.",
            rich_help_panel=LISTEN,
        ),
    ] = False,
    new_key: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Add a key to the file of --keys, print it, and stop.",
            rich_help_panel=LISTEN,
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does. (`exl2flow server` runs conversions.)

    Requests go to http://127.0.0.1:5000/v1; without a key in the environment, EXL2FLOW_API_KEY, or
    in the file of --keys, only from this machine.
    """
    from exl2flow.serve.apis.sections import checked
    from exl2flow.serve.hosts.reloading import Configuration

    def read() -> ServeOptions:
        return layered(ServeOptions, values, path=config, prefix=PREFIX, of="`exl2flow serve`")

    given = read()
    options = checked(given, config)
    if print_config:
        tell(as_toml(given))
        return
    if new_key is not None:
        from exl2flow.serve.hosts.keys import add_key

        if options.keys is None:
            raise ConfigError("`--new-key` goes with `--keys FILE`")
        tell(add_key(options.keys, new_key))
        return
    if options.model is None:
        raise ConfigError(
            "give the folder of a model, its name on the Hub, or a `--config` with `model`"
        )
    _run(options.model, Configuration(options, lambda: checked(read(), config), config))


def _run(model: Path, configuration: "Configuration") -> None:
    from exl2flow.cli.work.loading import prompt_cache  # imports torch
    from exl2flow.serve.hosts.keys import Keys
    from exl2flow.serve.hosts.models import Models
    from exl2flow.serve.http.app import create_app
    from exl2flow.serve.http.guard import is_open
    from exl2flow.serve.http.listening import listening, own_address, url_of
    from exl2flow.serve.http.running import run

    options = configuration.options
    if options.swap and options.models is None and not options.also:
        raise ConfigError("`--swap` goes with `--models` or `--also`")
    keys = Keys(options.keys, os.environ.get(KEY_VARIABLE))
    if not keys and is_open(options.host):
        why = f"`--host` is {options.host}, which others can reach"
        raise ConfigError(f"{why}; set {KEY_VARIABLE} or give `--keys`")
    first = local(model)
    names = _names({first: model} | {local(one): one for one in options.also})
    with listening(options.host, options.port) as (listener, address):
        keep = prompt_cache(_absolute(options))

        def make(folder: Path) -> "ModelHost":
            now, is_first = _absolute(configuration.options), folder.resolve() == first.resolve()
            given = now if is_first else _of_any(now)
            return _host(folder.absolute(), names.get(folder.resolve()), given, keep)

        also = {name: folder for folder, name in names.items() if folder != first.resolve()}
        models = Models(make(first), make, also)  # nothing else holds the host, which may be freed
        configuration.on_reload += [lambda: models.renew(configuration.options), keys.look]
        _log_requests(options)
        listener.listen(BACKLOG)
        say(f"serving on {address}")
        if (own := own_address(options.host)) is not None:
            say(f"for other machines: {url_of(own, listener.getsockname()[1])}", style="dim")
        is_reread = not (options.keys is None and configuration.path is None)
        run(create_app(models, keys), models, listener, configuration if is_reread else None)


def _names(given: Mapping[Path, Path]) -> dict[Path, str]:
    """Return real folder → the name of its model, each folder once, from folder → what was given.

    Raises:
        ConfigError: two models have one name.
    """
    names = dict[Path, str]()
    for folder, one in given.items():
        names.setdefault(folder.resolve(), name_of(one))
    for folder, name in names.items():
        if list(names.values()).count(name) > 1:
            raise ConfigError(f"`{folder}` and another model are both named `{name}`; rename one")
    return names


def _absolute(options: ServeOptions) -> ServeOptions:
    """Return options whose paths are absolute, so that messages for clients can leave them out."""
    rows = ((name, value) for name, value in options if name != "model")
    paths: dict[str, Path | str]
    paths = {name: value.absolute() for name, value in rows if isinstance(value, Path)}
    if options.draft_folder is not None:
        paths |= {"draft": str(options.draft_folder.absolute())}
    return options.model_copy(update=paths | {"lora": [one.absolute() for one in options.lora]})


def _of_any(options: ServeOptions) -> ServeOptions:
    """Return the options for another model, without the ones that fit only the first."""
    names = "draft lora format tool_format rope_scale rope_alpha rope_yarn"
    fields = ServeOptions.model_fields
    own = {name: fields[name].get_default(call_default_factory=True) for name in names.split()}
    return options.model_copy(update=own)


def _host(model: Path, name: str | None, options: ServeOptions, keep: "PromptCache") -> "ModelHost":
    from exl2flow.cli.options.chat import of_model
    from exl2flow.cli.work.loading import load, with_own_draft
    from exl2flow.engine import Adapter, Generator
    from exl2flow.engine.chat import choose_format
    from exl2flow.serve.hosts.model_host import ModelHost

    began = time.monotonic()
    loaded = load(model, options, slots=options.slots, tokens=options.tokens)
    fmt, why = choose_format(model, loaded.tokenizer, options.format)
    is_known = bool(options.format is not None or fmt.marks or fmt.tokens is not None)

    def make(draft: "Drafter | None") -> Generator:
        return Generator(
            loaded,
            cache=options.cache,
            tokens=options.tokens,
            slots=options.slots,
            draft=draft,
            keep=keep,
            chunk=CHUNKS[loaded.decoder.placement.head.type],
        )

    host = ModelHost(
        loaded,
        with_own_draft(options, loaded, make),
        options,
        fmt=fmt if is_known else None,
        defaults=of_model(model),
        adapters=tuple(Adapter.load(folder, loaded) for folder in options.lora),
        name=name,
    )
    host.start()
    host.load_seconds = time.monotonic() - began
    if not is_known:
        say("warning: no chat template, only completions; `--format` names one", style="yellow")
    for warning in host.warnings:
        say(f"warning: {warning}", style="yellow")
    say(f"{host.name}; {why}; tool calls as `{host.tool_format.name}`", style="dim")
    return host


class _Lines(logging.Formatter):
    """Writes a record as JSON, with the names of what its message shows."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        told = record.args if isinstance(record.args, dict) else {"message": super().format(record)}
        return json.dumps({"time": self.formatTime(record), "level": record.levelname, **told})


def _log_requests(options: ServeOptions) -> None:
    logger, handler = logging.getLogger("exl2flow.serve"), logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(message)s")
    handler.setFormatter(_Lines() if options.log_json else plain)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
