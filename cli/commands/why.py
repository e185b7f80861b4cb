"""`exl2flow why`: which input of a run changed, and what is done again."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from exl2flow.cli.options import AsJson, flags
from exl2flow.cli.output.console import emit_json, show
from exl2flow.cli.output.tables import plan_table, table_of
from exl2flow.core.errors import ConfigError

EXAMPLES = (
    "exl2flow why ./Llama-3.2-1B-4.0bpw",
    "exl2flow why ./Llama-3.2-1B-4.0bpw quantize",
    "exl2flow why ./.exl2flow/llama-3.2-1b-1f0c6e2d9a4b/measure/3fa9c14be07d5528",
    "With other options: `exl2flow convert … --dry-run` says the same before it runs.",
)


def why(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Output folder of a conversion, bitrate or refinement, finished or not; or the "
            "folder of a stage in the work root.",
        ),
    ],
    stage: Annotated[
        str | None,
        typer.Argument(metavar="STAGE", help="Only this stage.", show_default="all of them"),
    ] = None,
    *,
    work_root: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of checkpoints.",
            show_default="`.exl2flow` beside RUN, else one folder above",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which input changed since a stage last ran, and what the same command would do again.

    An input is an option, a file that one names, a file of the source, or a stage's code. For a
    finished stage the changes are those since the result before it. Nothing is changed.
    """
    from exl2flow.cli.work.earlier import find_run, pipeline_of
    from exl2flow.core.store.changes import outlook, stage_rows  # these import torch

    record, named = find_run(run, work_root)
    pipeline = pipeline_of(record)
    if (wanted := stage or named) is not None and wanted not in pipeline.stages:
        choices = ", ".join(f"`{name}`" for name in pipeline.stages)
        raise ConfigError(f"no stage `{wanted}`; choose one of {choices}")
    outlooks = [each for each in outlook(pipeline) if wanted in (None, each.stage)]
    if as_json:
        emit_json({"run": record.config, "stages": [asdict(each) for each in outlooks]})
        return
    names = flags()
    title = [("source", str(pipeline.config.source)), ("output", str(pipeline.config.out))]
    show(plan_table([*title, *stage_rows(outlooks, names)]))
    show(table_of([each.row(names) for each in outlooks]))
