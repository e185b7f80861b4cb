"""`exl2flow measure`: one measurement for any number of bitrates."""

from pathlib import Path
from typing import Annotated

import typer

from exl2flow.core.errors import ConfigError
from exl2flow.flows.cli.options import (
    AsJson,
    DryRun,
    Restart,
    Source,
    Values,
    build_measurement,
    with_settings,
)
from exl2flow.flows.cli.options.source import FORM_OF_SOURCE
from exl2flow.flows.cli.options.table import CALIBRATION, QUALITY, RUNNING
from exl2flow.flows.cli.running import run_command

FILE_NAME = "measurement.json"
EXAMPLES = (
    "Examples:",
    "exl2flow measure ./Llama-3.2-1B --out ./measurement.json",
    "exl2flow convert ./Llama-3.2-1B --out ./3bpw --bpw 3 --measurement ./measurement.json",
)


@with_settings(FORM_OF_SOURCE, QUALITY, CALIBRATION, RUNNING)
def measure(
    source: Source,
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="FILE",
            help="File for the measurement, or a folder, which receives `measurement.json`.",
            show_default=False,
        ),
    ],
    values: Values,
    restart: Restart = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Measure the size and the error of every bit-width candidate.

    The measurement depends on the model and the calibration, not on the bitrate. exllamav2 reads
    the file, too, if it was made with `--sensitivity error`.
    """
    target = out / FILE_NAME if out.is_dir() else out
    if target.suffix != ".json":
        raise ConfigError(f"`--out {out}` is neither a folder nor a name that ends in `.json`")
    config = build_measurement(source, target, values)
    run_command(
        "measure", config, restart=restart, no_prefect=True, dry_run=dry_run, as_json=as_json
    )
