"""`exl2flow convert`: from a Hugging Face folder to a validated EXL2 model."""

from pathlib import Path
from typing import Annotated

import typer

from exl2flow.flows.cli.options import (
    AsJson,
    DryRun,
    NoPrefect,
    Restart,
    Source,
    Values,
    build,
    with_settings,
)
from exl2flow.flows.cli.options.table import CONVERSION
from exl2flow.flows.cli.running import run_command

EXAMPLES = (
    "Examples:",
    "exl2flow convert ./Llama-3.2-1B --out ./Llama-3.2-1B-4.0bpw --bpw 4.0",
    "exl2flow convert org/name --out ./out --bpw 4   (fetches the model from the Hub)",
    "exl2flow convert ./Llama-3.2-1B --out ./out --bpw 2.5 --dry-run   (only checks)",
    "exl2flow convert ./Llama-3.2-1B --out ./out --calibration mine.parquet --rows 64",
    "exl2flow convert org/name --out ./out --bpw 4 --publish me/name-exl2",
    "To resume an interrupted conversion, repeat the command. Another `--bpw` with the same "
    "`--work-root` reuses the measurement.",
)


@with_settings(*CONVERSION)
def convert(
    source: Source,
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder for the converted model: new, empty, or left by an earlier conversion of "
            "the same source.",
            show_default=False,
        ),
    ],
    values: Values,
    restart: Restart = False,
    no_prefect: NoPrefect = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Convert a Hugging Face model into an EXL2 model.

    Stages: tokenize, sensitivity, measure, allocate, quantize, compile, validate; some options add
    compose before tokenize, supplement after measure, tune after quantize. Each resumes where it
    stopped and is kept in the work root.
    """
    config = build(source, out, values)
    run_command(
        "convert",
        config,
        restart=restart,
        no_prefect=no_prefect,
        dry_run=dry_run,
        as_json=as_json,
    )
