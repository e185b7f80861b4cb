"""`exl2flow sweep`: one model at several bitrates, from one measurement."""

from pathlib import Path
from typing import Annotated

import typer

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.sweep import Runner
from exl2flow.flows.cli.options import (
    AsJson,
    DryRun,
    NoPrefect,
    Restart,
    Source,
    Values,
    build_sweep,
    one_of,
    with_settings,
)
from exl2flow.flows.cli.options.common import RUNNING
from exl2flow.flows.cli.options.table import SWEEP
from exl2flow.flows.cli.running import run_command

EXAMPLES = (
    "Examples:",
    "exl2flow sweep ./Llama-3.2-1B --out ./Llama-3.2-1B-exl2 --bpw 2.5,3,4,5,6",
    "exl2flow sweep ./Llama-3.2-1B --out ./exl2 --bpw 3,4,5,6 --runner processes   (a GPU each)",
    "exl2flow sweep org/name --out ./exl2 --bpw 3,4,5,6 --publish me/name-exl2",
    "A bitrate that fails does not stop the others. Repeat the command to make what is missing.",
)


@with_settings(*SWEEP)
def sweep(
    source: Source,
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder for the results: one folder per bitrate (`4.0bpw`), `sweep.json` and "
            "`report.html`.",
            show_default=False,
        ),
    ],
    bpw: Annotated[
        str,
        typer.Option(
            "--bpw",
            metavar="BITS,…",
            help="Bitrates to make, in bits per weight: from 2 to 8, separated by commas.",
            show_default=False,
        ),
    ],
    values: Values,
    runner: Annotated[
        Runner,
        typer.Option(
            "--runner",
            metavar="NAME",
            parser=one_of(Runner),
            help="What makes the bitrates: threads of one process, processes with one GPU each, or "
            "the workers of dask or ray.",
            rich_help_panel=RUNNING,
        ),
    ] = "threads",
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            help="How many bitrates to make at the same time.",
            show_default="one per GPU; 1 with threads",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="ADDRESS",
            help="Address of a running Dask or Ray cluster.",
            show_default="one for this sweep",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    restart: Restart = False,
    no_prefect: NoPrefect = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Convert a model at several bitrates from one measurement, and compare the results.

    Calibration tokens, sensitivity and measurement are shared by all bitrates.
    """
    running = {"runner": runner, "workers": workers, "cluster": cluster}
    given = {name: value for name, value in running.items() if value is not None}
    config = build_sweep(source, out, {**values, **given, "bpw": _bits(bpw)})
    if no_prefect and (runner != "threads" or (workers or 1) > 1):
        raise ConfigError(
            "`--no-prefect` makes one bitrate after the other; leave out `--runner` and `--workers`"
        )
    run_command(
        "sweep",
        config,
        restart=restart,
        no_prefect=no_prefect,
        dry_run=dry_run,
        as_json=as_json,
    )


def _bits(text: str) -> tuple[float, ...]:
    """Return the numbers in a comma-separated list.

    Raises:
        ConfigError: an entry is not a number.
    """
    try:
        return tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ConfigError(
            f"`--bpw {text}` is not a comma-separated list of numbers, such as `2.5,3,4`"
        ) from None
