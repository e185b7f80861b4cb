"""`exl2flow why`: which input of a run changed, and what is done again."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.config import ConversionConfig, RunOptions, default_work_root
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.flows.cli.console import emit_json, show
from exl2flow.flows.cli.options import AsJson, flags, validated
from exl2flow.flows.cli.tables import plan_table, table_of

if TYPE_CHECKING:
    from exl2flow.core.store.manifest import RunRecord
    from exl2flow.core.store.stage import Pipeline

EXAMPLES = (
    "Examples:",
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
            show_default=False,
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
            "--work-root",
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
    from exl2flow.core.store.changes import outlook, stage_rows  # these import torch

    record, named = _found(run, work_root)
    pipeline = _pipeline(record)
    if (wanted := stage or named) is not None and wanted not in pipeline.stages:
        choices = ", ".join(f"`{name}`" for name in pipeline.stages)
        raise ConfigError(f"there is no stage `{wanted}`; choose one of {choices}")
    found = [each for each in outlook(pipeline) if wanted in (None, each.stage)]
    if as_json:
        emit_json({"run": record.config, "stages": [asdict(each) for each in found]})
        return
    names = flags()
    title = [("source", str(pipeline.config.source)), ("output", str(pipeline.config.out))]
    show(plan_table([*title, *stage_rows(found, names)]))
    show(table_of([each.row(names) for each in found]))


def _found(run: Path, work_root: Path | None) -> tuple["RunRecord", str | None]:
    """Return the last run into a folder, or of a stage's folder with the stage's name.

    Raises:
        ConfigError: there is none.
    """
    from exl2flow.core.store.store import MANIFEST, StageFolder

    run = run.resolve()
    if (run / MANIFEST).is_file():
        folder = StageFolder.found(run)
        if folder is None or folder.manifest.run is None:
            raise ConfigError(
                f"the manifest of `{run}` is damaged, or from a version that did not record runs; "
                "repeat the command with `--dry-run`"
            )
        return _placed(folder.manifest.run, run.parents[2]), folder.manifest.stage
    beside, above = default_work_root(run), default_work_root(run.parent)
    outs: dict[str, RunRecord] = {}
    for root in (work_root,) if work_root else (beside, above):  # above: of a sweep's bitrates
        known = {str(record.config["out"]): record for record in _records(root)}
        if str(run) in known:
            return _placed(known[str(run)], root), None
        outs |= known
    where = f"`{work_root}`" if work_root else f"`{beside}` and `{above}`"
    listed = ", ".join(f"`{path}`" for path in sorted(outs))
    raise ConfigError(
        f"no run into `{run}` is known in {where}; "
        + (f"give one of {listed}, or" if listed else "name")
        + " the folder of its checkpoints with `--work-root`"
    )


def _placed(record: "RunRecord", root: Path) -> "RunRecord":
    """Return a run with the work root where it was found, which may have been moved."""
    return record.model_copy(update={"config": {**record.config, "work_root": str(root.resolve())}})


def _records(root: Path) -> Iterator["RunRecord"]:
    """Yield the runs that worked on the stages in a work root, the last one last."""
    from exl2flow.core.store.store import MANIFEST, StageFolder

    for path in sorted(root.glob(f"*/*/*/{MANIFEST}"), key=lambda path: path.stat().st_mtime):
        folder = StageFolder.found(path.parent)
        if folder is not None and folder.manifest.run is not None:
            yield folder.manifest.run


def _pipeline(record: "RunRecord") -> "Pipeline":
    """Return the stages of a run as they would be resolved today."""
    from exl2flow.flows.runs.conversion import open_pipeline
    from exl2flow.tasks.stages import REFINE_STAGES, STAGES

    refines = "model" in record.config
    kind: type[RunOptions] = RefinementConfig if refines else ConversionConfig
    stages = [s for s in (REFINE_STAGES if refines else STAGES) if s.name in record.stages]
    return open_pipeline(validated(kind, record.config, flags()), stages)
