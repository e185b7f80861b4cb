"""The manifest of a stage folder, sealed by a checksum."""

import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field

from exl2flow.core.errors import CorruptCheckpoint
from exl2flow.core.options.config import RunOptions
from exl2flow.core.store.files import FileRecord, digest_of

CHECKSUM = "checksum"  # of all other entries of the manifest
PATHS = {"source", "out", "work_root", "measurement", "model"}  # options of runs


class SavedStates(BaseModel):
    """Hidden states as they enter sublayer `index`, in one of the two files."""

    model_config = ConfigDict(frozen=True, strict=True)

    file: str = Field(pattern=r"^states-[ab]\.safetensors$")
    index: int
    record: FileRecord


class RunRecord(BaseModel):
    """The run that last worked on a stage: its stages, and its options with absolute paths."""

    model_config = ConfigDict(frozen=True, strict=True)

    stages: list[str]
    config: dict[str, Any]

    @classmethod
    def of(cls, stages: Iterable[str], config: RunOptions) -> Self:
        """Return the record of a run, from which its pipeline can be made again anywhere."""
        options = config.model_dump(mode="json", exclude={"publish", "token_block"})
        for name in PATHS & options.keys():
            options[name] = _absolute(options[name])
        if config.calibration.file is not None:
            options["calibration"]["text"] = _absolute(options["calibration"]["text"])
        if judged := options.get("validate_options"):
            judged["text"] = _absolute(judged["text"])
        return cls(stages=list(stages), config=options)


def _absolute(path: str | None) -> str | None:
    return path and str(Path(path).resolve())


class StageManifest(BaseModel):
    """Files, options and progress of a stage folder; rewritten after every commit.

    Fields that a newer version has added are ignored.
    """

    model_config = ConfigDict(strict=True)

    stage: str
    schema_version: int
    fingerprint: str
    inputs: dict[str, str]
    options: dict[str, object]
    device: str
    status: Literal["partial", "complete", "cleared"] = "partial"  # cleared: without its tensors
    cursor: int = 0
    total: int = 0
    files: dict[str, FileRecord] = {}
    states: SavedStates | None = None
    notes: list[str] = []
    seconds: float = 0.0
    versions: dict[str, str] = {}
    source: dict[str, str] = {}  # file of the source model → sha256
    run: RunRecord | None = None

    def sealed(self) -> dict[str, object]:
        """Return the JSON content with a checksum that reveals alterations."""
        content = self.model_dump(mode="json")
        return {**content, CHECKSUM: digest_of(content)}

    @classmethod
    def unsealed(cls, content: object) -> Self:
        """Read what `sealed` returned.

        Raises:
            CorruptCheckpoint: the checksum is wrong.
        """
        if not isinstance(content, dict) or content.pop(CHECKSUM, None) != digest_of(content):
            raise CorruptCheckpoint("the checksum of a manifest is wrong")
        return cls.model_validate(content)


def versions() -> dict[str, str]:
    """Return the versions that can change a result."""
    return {
        "exl2flow": version("exl2flow"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
