"""`exl2flow bench`: how fast a model loads, reads and decodes on this machine."""

from exl2flow.cli.options import AsJson, ModelFolder, local, with_options
from exl2flow.cli.output.console import emit_json, say
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.generation import BenchOptions

EXAMPLES = (
    "exl2flow bench ./Llama-3.2-1B-4.0bpw",
    "exl2flow bench ./model --context 8192 --cache q4 --rows 1,2,8,32",
    "exl2flow bench ./model --json > speed.json",
)


@with_options(panel="Options", hides=False)
def bench_command(model: ModelFolder, *, options: BenchOptions, as_json: AsJson = False) -> None:
    """Time a model in less than a minute: loading, prompts, decoding; on a GPU also its memory.

    What would take too long on this machine is shortened or left out, with a note. On a GPU, the
    rate at which decoding reads weights, keys and values is given as a share of the rate at which a
    copy reads and writes memory, and a second table tells how the products of a layer are launched.
    """
    counts = _counts(options.rows)
    from exl2flow.cli.output.results import show_speed
    from exl2flow.cli.work.loading import shared_by, split_of  # these import torch
    from exl2flow.engine.cache.paged import whole_pages
    from exl2flow.inference.bench import bench
    from exl2flow.pipeline.devices import choose_allocator

    model = local(model, plain=as_json)
    choose_allocator()
    largest = max(counts)
    tokens = largest * whole_pages(options.context + 1)
    speed = bench(
        model,
        device=options.device,
        placement=split_of(options, tokens=tokens, slots=largest),
        tensor_parallel=shared_by(options),
        embedding=options.embedding,
        cache=options.cache,
        context=options.context,
        rows=counts,
        report=lambda text: None if as_json else say(text, style="dim"),
    )
    if as_json:
        emit_json(speed.to_json())
    else:
        show_speed(speed)


def _counts(text: str) -> tuple[int, ...]:
    """Return the numbers in a comma-separated list, at least one; raises `ConfigError`."""
    entries = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in entries):
        raise ConfigError(
            f"`--rows {text}` is not a comma-separated list of numbers from 1 on, such as `1,4,16`"
        )
    return tuple(map(int, entries))
