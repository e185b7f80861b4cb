"""`exl2flow bench`: how fast a model loads, reads and decodes on this machine."""

from typing import TYPE_CHECKING, Annotated

import typer

from exl2flow.core import words
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.generation import BenchOptions
from exl2flow.flows.cli.console import emit_json, say, show
from exl2flow.flows.cli.loading import split_of
from exl2flow.flows.cli.options import ModelFolder, with_options
from exl2flow.flows.cli.tables import plan_table, table_of

if TYPE_CHECKING:
    from exl2flow.inference.bench import Speed, Timing

EXAMPLES = (
    "Examples:",
    "exl2flow bench ./Llama-3.2-1B-4.0bpw",
    "exl2flow bench ./model --context 8192 --cache q4 --rows 1,2,8,32",
    "exl2flow bench ./model --json > speed.json",
)


@with_options(panel="Options", hides=False)
def bench_command(
    model: ModelFolder,
    *,
    options: BenchOptions,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object instead of a table."),
    ] = False,
) -> None:
    """Time a model in less than a minute: loading, prompts, decoding; on a GPU also its memory.

    What would take too long on this machine is shortened or left out, with a note. On a GPU, the
    rate at which decoding reads weights, keys and values is given as a share of the rate at which a
    copy reads and writes memory.
    """
    counts = _counts(options.rows)
    from exl2flow.flows.runs.conversion import choose_allocator
    from exl2flow.inference.bench import bench
    from exl2flow.kernels import PAGE_TOKENS

    choose_allocator()
    most = max(counts)
    found = bench(
        model,
        device=options.device,
        placement=split_of(
            options, tokens=most * (options.context // PAGE_TOKENS + 1) * PAGE_TOKENS, slots=most
        ),
        cache=options.cache,
        context=options.context,
        rows=counts,
        report=lambda text: None if as_json else say(text, style="dim"),
    )
    if as_json:
        emit_json(found.to_json())
        return
    show(plan_table(_summary(found)))
    show(table_of([_row(timing, found) for timing in found.timings]))
    for text in found.omitted:
        say(f"left out: {text}", style="yellow")


def _counts(text: str) -> tuple[int, ...]:
    """Return the numbers in a comma-separated list.

    Raises:
        ConfigError: one is no number of rows, or there is none.
    """
    entries = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in entries):
        raise ConfigError(
            f"`--rows {text}` is not a comma-separated list of numbers from 1 on, such as `1,4,16`"
        )
    return tuple(map(int, entries))


def _summary(found: "Speed") -> list[tuple[str, str]]:
    copies = "" if found.copy_rate is None else f", copies at {found.copy_rate:,.0f} GB/s"
    rate = found.file_bytes / found.load_seconds
    lines = [
        ("model", found.model),
        ("device", found.device + copies),
        ("versions", ", ".join(f"{name} {number}" for name, number in found.versions.items())),
        (
            "load",
            f"{found.load_seconds:.2f} s, {words.size(found.file_bytes)}, {words.size(rate)}/s",
        ),
    ]
    if found.memory is not None:
        weights, cache, peak = (
            words.size(count)
            for count in (found.memory.weights, found.memory.cache, found.memory.peak)
        )
        lines.append(("memory", f"weights {weights}, cache at most {cache}, peak {peak}"))
    return [*lines, ("cache", found.cache)]


def _row(timing: "Timing", found: "Speed") -> dict[str, str]:
    """Return a row of the table; only a GPU has a last column."""
    row = {
        "work": timing.work,
        "rows": str(timing.rows),
        "context": f"{timing.context:,}",
        "ms": f"{1e3 * timing.seconds:,.3f}",
        "tokens/s": f"{timing.tokens_per_second:,.1f}",
    }
    if found.copy_rate is not None:
        share = timing.share_of_copy(found.copy_rate)
        row["share of a copy"] = "" if share is None else words.percent(share, 0)
    return row
