"""The manifest of a stage folder, sealed by a checksum."""

import platform
from importlib.metadata import version
from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field

from exl2flow.core.errors import CorruptCheckpoint
from exl2flow.core.files import FileRecord, digest_of

CHECKSUM = "checksum"  # of all other entries of the manifest


class SavedStates(BaseModel):
    """Hidden states as they enter sublayer `index`, in one of the two files."""

    model_config = ConfigDict(frozen=True)

    file: str = Field(pattern=r"^states-[ab]\.safetensors$")
    index: int
    record: FileRecord


class StageManifest(BaseModel):
    """What a stage folder holds; rewritten after every commit.

    Fields that a newer version has added are ignored.
    """

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
