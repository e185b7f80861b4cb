"""Find an earlier run by its output, or by the folder of one of its stages."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from exl2flow.cli.options import flags, validated
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.config import ConversionConfig, RunOptions, default_work_root
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.store.manifest import RunRecord
from exl2flow.core.store.stage import Pipeline, Stage
from exl2flow.core.store.store import MANIFEST, StageFolder
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.stages import REFINE_STAGES, STAGES


def find_run(run: Path, work_root: Path | None) -> tuple[RunRecord, str | None]:
    """Return the last run into a folder, or of a stage's folder with the stage's name.

    Raises:
        ConfigError: there is none.
    """
    run = run.resolve()
    if (run / MANIFEST).is_file():
        folder = StageFolder.load(run)
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
    listed = ", ".join(map(_shown, sorted(outs)))
    raise ConfigError(
        f"no run into `{run}` is known in {where}; "
        + (f"give one of {listed}, or" if listed else "name")
        + " the folder of its checkpoints with `--work-root`"
        + (_moved(run, outs) if run.is_dir() else "")
    )


def _shown(out: str) -> str:
    return f"`{out}`" if Path(out).exists() else f"`{out}` (which is no longer there)"


def _moved(run: Path, outs: Iterable[str]) -> str:
    """Return how to ask about an output that was moved: by the folder that it was made as."""
    gone = [path for path in outs if not Path(path).exists()]
    likely = next((path for path in gone if Path(path).name == run.name), f"OLD/{run.name}")
    return f"; if the folder was moved, name the one it was made as: `exl2flow why {likely}`"


def _placed(record: RunRecord, root: Path) -> RunRecord:
    """Return a run with the work root where it was found, which may have been moved."""
    return record.model_copy(update={"config": {**record.config, "work_root": str(root.resolve())}})


def _records(root: Path) -> Iterator[RunRecord]:
    """Yield the runs that worked on the stages in a work root, the last one last."""
    for path in sorted(root.glob(f"*/*/*/{MANIFEST}"), key=lambda path: path.stat().st_mtime):
        folder = StageFolder.load(path.parent)
        if folder is not None and folder.manifest.run is not None:
            yield folder.manifest.run


def pipeline_of(record: RunRecord) -> Pipeline:
    """Return the stages of a run as they would be resolved today."""
    refines = "model" in record.config
    kind: type[RunOptions] = RefinementConfig if refines else ConversionConfig
    known: tuple[Stage[Any], ...] = REFINE_STAGES if refines else STAGES
    stages = [stage for stage in known if stage.name in record.stages]
    return open_pipeline(validated(kind, record.config, flags()), stages)
