"""`exl2flow soak`: run a server at its limits, and compare its memory with the plan."""

import typer

from exl2flow.cli.options import (
    AsJson,
    ModelFolder,
    Values,
    build,
    local,
    settings_of,
    with_options,
    words_of,
)
from exl2flow.cli.output.console import emit_json
from exl2flow.core.options.serving import ServeOptions, SoakOptions

# of `exl2flow serve`
FIELDS = {
    *("also", "cache", "device", "draft", "embedding"),
    *("max_tokens", "ngram", "slots", "tokens"),
}
OF_SERVER = tuple(setting for setting in settings_of(ServeOptions) if setting.field in FIELDS)
EXAMPLES = (
    "exl2flow soak ./model --cache q6 --tokens 65536 --slots 2",
    "exl2flow soak ./model --cache q8/q4 --max-tokens 262144 --slots 1 --memory 24GB",
)


@with_options(*settings_of(SoakOptions), *OF_SERVER)
def soak(model: ModelFolder, *, values: Values, as_json: AsJson = False) -> None:
    """Run a server at its limits: growing conversations, long prompts, answers that are cut off.

    Tells whether it came through, the most memory that it took beside what was planned, and the
    slowest token. The exit code is 1 if a turn failed.
    """
    from exl2flow.cli.work.soak import run_soak, show_soak

    own = SoakOptions.model_fields
    options = build(SoakOptions, {name: x for name, x in values.items() if name in own})
    server = build(ServeOptions, {name: x for name, x in values.items() if name not in own})
    words = words_of(OF_SERVER, values) + (["--swap"] if server.also else [])
    verdict = run_soak(local(model), options, server, words, is_quiet=as_json)
    if as_json:
        emit_json(verdict.to_json())
    else:
        show_soak(verdict)
    if not verdict.has_passed:
        raise typer.Exit(1)
