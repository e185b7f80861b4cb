"""`exl2flow refine`: better codes and scales for an EXL2 model, at the same size."""

from pathlib import Path
from typing import Annotated

import typer

from exl2flow.flows.cli.options import (
    AsJson,
    DryRun,
    NoPrefect,
    Restart,
    Values,
    build_refinement,
    with_settings,
)
from exl2flow.flows.cli.options.table import CALIBRATION, QUALITY, RUNNING, VALIDATION
from exl2flow.flows.cli.running import run_command

EXAMPLES = (
    "Examples:",
    "exl2flow refine ./Llama-3.2-1B-4.0bpw --reference ./Llama-3.2-1B --out ./refined",
    "exl2flow refine ./old --reference ./Llama-3.2-1B --out ./refined --quality best",
    "exl2flow refine ./old --reference ./Llama-3.2-1B --out ./refined --dry-run   (only checks)",
    "To resume an interrupted run, repeat the command.",
)


@with_settings(QUALITY, CALIBRATION, VALIDATION, RUNNING)
def refine(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Folder of the EXL2 model, made by exl2flow or exllamav2.",
            show_default=False,
        ),
    ],
    *,
    reference: Annotated[
        Path,
        typer.Option(
            "--reference",
            metavar="SOURCE",
            help="The unquantized model it was made from: a folder, or org/name on the Hub.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder for the refined model: new, empty, or left by an earlier run with the "
            "same reference.",
            show_default=False,
        ),
    ],
    values: Values,
    restart: Restart = False,
    no_prefect: NoPrefect = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Refit the codes and scales of an EXL2 model to its source.

    Bit widths, groups and permutations stay, so the size is the same to the byte. Held-out rows of
    text judge the result: if they do not get closer to the source, the old matrices stay.
    """
    config = build_refinement(model, reference, out, values)
    run_command(
        "refine",
        config,
        restart=restart,
        no_prefect=no_prefect,
        dry_run=dry_run,
        as_json=as_json,
    )
