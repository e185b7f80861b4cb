"""Outlines: models on the Hub of which everything is here but the weights.

An outline is a folder with a model's small files and, for each file with weights, a sparse file of
its size that holds only its header. The record beside the folder marks it: whoever needs values or
digests asks for it, so that zeros never pass for weights.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from exl2flow.core.errors import NO_JSON
from exl2flow.core.store.files import write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The Hub's facts about a model before its weights are fetched.

    place: the folder that a fetch makes; download_bytes: what it still has to fetch;
    digests: file name → sha256 of the real files.
    """

    place: str
    download_bytes: int
    digests: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Return the record of an outline, None for other folders."""
        try:
            return cls(**json.loads(_record(folder).read_bytes()))
        except (*NO_JSON, TypeError):
            return None

    def write(self, folder: Path) -> None:
        """Mark a folder as an outline."""
        write_json(_record(folder), asdict(self))


def place_of(source: Path) -> Path:
    """Return where a source is, or where the model of an outline will be."""
    outline = Outline.of(source)
    return Path(outline.place) if outline else source.resolve()


def known_digests(paths: Sequence[Path]) -> dict[Path, str]:
    """Return path → sha256 of the files that belong to outlines."""
    outlines = {folder: Outline.of(folder) for folder in {path.parent for path in paths}}
    return {
        path: outline.digests[path.name]
        for path in paths
        if (outline := outlines[path.parent]) is not None and path.name in outline.digests
    }


def _record(folder: Path) -> Path:
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}.outline.json")
