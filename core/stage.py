"""What a stage is, and how a list of stages becomes fingerprints, folders and runs.

A fingerprint covers the stage's name, schema, options and the fingerprints of its inputs, beginning
with the source model's: changing an option redoes the stages that depend on it and no others.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from exl2flow.core.config import ConversionConfig, RunOptions
from exl2flow.core.errors import Interrupted
from exl2flow.core.files import digest_of
from exl2flow.core.interrupt import StopRequest, listening
from exl2flow.core.progress import Progress, Tick
from exl2flow.core.source import SourceFingerprint
from exl2flow.core.store import StageFolder, StageRef, WorkDir

log = logging.getLogger(__name__)

# What quantization writes and inference reads, which do not import each other
ROWS_FILE = "rows.safetensors"  # calibration rows, int64 (rows, tokens) per mix
KINDS_FILE = "rows.json"  # what each row is made of
COMPOSED = "composed"  # the tensor of rows that the source wrote itself
RECORD_FILE = "exl2flow.json"  # in an output folder: what made it; also marks it as ours
SCORE_FILE = "exl2flow-score.json"  # beside it: what validation found


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """Everything a stage function is given."""

    config: ConversionConfig
    folder: StageFolder
    inputs: Mapping[str, Path]
    device: str
    progress: Progress
    stop: StopRequest

    def tick(self, done: int, total: int, detail: str = "") -> None:
        """Report progress of this stage."""
        self.progress(Tick(stage=self.folder.manifest.stage, done=done, total=total, detail=detail))

    def stop_if_asked(self) -> None:
        """Leave the stage when a signal came; call right after a commit.

        Raises:
            Interrupted: a signal came.
        """
        if self.stop.signum is not None:
            manifest = self.folder.manifest
            raise Interrupted(
                f"stopped in stage `{manifest.stage}` after {manifest.cursor} of {manifest.total}; "
                "everything finished is saved",
                signum=self.stop.signum,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One node of the pipeline: a plain resumable function and what determines its result."""

    name: str
    schema: int
    inputs: tuple[str, ...]
    options: Callable[[ConversionConfig], Mapping[str, object]]
    run: Callable[[StageRun], None]
    enabled: Callable[[ConversionConfig], bool] = lambda config: True


class Pipeline:
    """The stages of one configuration, resolved to folders in one work directory."""

    def __init__(self, config: RunOptions, stages: Sequence[Stage], *, device: str) -> None:
        """Resolve all fingerprints; reads the source's files once (digests are remembered)."""
        self.config = cast(ConversionConfig, config)  # stages read what their pipeline's has
        self.device = device
        self.stages = {stage.name: stage for stage in stages if stage.enabled(self.config)}
        source = SourceFingerprint.of(config.source, memory=config.work_dir_root / "digests.json")
        self.work = WorkDir(config.work_dir_root / f"{source.slug}-{source.fingerprint[:12]}")
        self.refs: dict[str, StageRef] = {}
        self._options: dict[str, dict[str, object]] = {}
        for stage in self.stages.values():
            self._options[stage.name] = dict(stage.options(self.config))
            identity = {
                "stage": stage.name,
                "schema": stage.schema,
                "options": self._options[stage.name],
                "inputs": self._input_fingerprints(stage),
                "source": source.fingerprint,
            }
            self.refs[stage.name] = self.work.ref(stage.name, digest_of(identity))

    def _input_fingerprints(self, stage: Stage) -> dict[str, str]:
        return {name: self.refs[name].fingerprint for name in stage.inputs if name in self.refs}

    def path(self, name: str) -> Path:
        """Return the folder of a stage."""
        return self.work.path(self.refs[name])

    def is_complete(self, name: str) -> bool:
        """Tell whether a stage needs no work."""
        return self.work.is_complete(self.refs[name])

    def run(self, name: str, *, progress: Progress) -> StageRef:
        """Run a stage unless its result is there, and return its reference.

        Raises:
            WorkDirBusy: another process works on this stage, or clears the work directory.
            Interrupted: a signal came; everything finished is committed.
        """
        ref = self.refs[name]
        with self.work.lock_stage(ref, self.config.out), listening() as stop:
            if self.is_complete(name):
                log.info("stage=%s cached path=%s", name, self.path(name))
            elif stop.signum is None:  # it may have come while another stage ran
                self._work(self.stages[name], ref, progress=progress, stop=stop)
        if stop.signum is not None:  # it came where the stage itself no longer looks
            raise Interrupted(
                f"stopped at stage `{name}`; everything finished is saved", signum=stop.signum
            )
        return ref

    def _work(self, stage: Stage, ref: StageRef, *, progress: Progress, stop: StopRequest) -> None:
        """Run a stage in its folder and mark it complete."""
        folder = self.work.open(
            ref,
            schema=stage.schema,
            inputs=self._input_fingerprints(stage),
            options=self._options[stage.name],
            device=self.device,
        )
        stage.run(
            StageRun(
                config=self.config,
                folder=folder,
                inputs={key: self.path(key) for key in stage.inputs if key in self.refs},
                device=self.device,
                progress=progress,
                stop=stop,
            )
        )
        folder.complete()
