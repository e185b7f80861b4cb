"""`exl2flow measure`: one measurement for any number of bits per weight."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from exl2flow.core.errors import ConfigError
from exl2flow.flows.cli.console import OUT, emit_json
from exl2flow.flows.cli.options import Source, Values, build, with_settings
from exl2flow.flows.cli.progress import shown
from exl2flow.flows.cli.settings import CALIBRATION, QUALITY, RUNNING
from exl2flow.flows.cli.sources import with_local_source

FILE_NAME = "measurement.json"
MOST_BPW = 8.0  # reachable for every model; a measurement does not depend on it
EXAMPLES = (
    "Examples:",
    "exl2flow measure ./Llama-3.2-1B --out ./measurement.json",
    "exl2flow convert ./Llama-3.2-1B --out ./3bpw --bpw 3 --measurement ./measurement.json",
)


@with_settings(QUALITY, CALIBRATION, RUNNING)
def measure(
    source: Source,
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Where the measurement goes; a folder receives `measurement.json`.",
            show_default=False,
        ),
    ],
    values: Values,
    restart: Annotated[
        bool, typer.Option("--restart", help="Forget the checkpoints of this measurement.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout: path and work folder.")
    ] = False,
) -> None:
    """Measure what every candidate of bits costs in size and in error.

    The measurement depends on the model and the calibration, not on the bits per weight. exllamav2
    reads the file as well if it was made with `--sensitivity error`.
    """
    target = out / FILE_NAME if out.is_dir() else out
    if target.suffix != ".json":
        raise ConfigError(f"`--out {out}` is neither a folder nor a name that ends in `.json`")
    unused = target.with_name(f".{target.stem}.unused")  # of the conversion only this part is run
    config = build(source, unused, {**values, "bpw": MOST_BPW})
    config = with_local_source(config, plain=as_json, renew=restart)
    from exl2flow.core.files import replacing  # these import torch
    from exl2flow.flows.cli.restart import forget
    from exl2flow.flows.conversion import open_pipeline
    from exl2flow.flows.local import run_locally
    from exl2flow.tasks.stages import MEASURE_STAGES

    if restart:
        forget(open_pipeline(config, MEASURE_STAGES))
    with shown(plain=as_json):
        folder = run_locally(config, stages=MEASURE_STAGES).stages["measure"]
    with (folder / FILE_NAME).open("rb") as file, replacing(target) as copy:
        shutil.copyfileobj(file, copy)
    if as_json:
        emit_json({"measurement": str(target.resolve()), "folder": str(folder)})
    else:
        OUT.print(f"measurement  {target.resolve()}", markup=False, soft_wrap=True)
