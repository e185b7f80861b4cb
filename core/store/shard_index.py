"""`model.safetensors.index.json`: which file of a folder holds each tensor."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from exl2flow.core.errors import NO_JSON
from exl2flow.core.store.model_files import weight_files

INDEX_FILE = "model.safetensors.index.json"

log = logging.getLogger(__name__)


def shard_index(folder: Path) -> Mapping[str, str]:
    """Return tensor name → name of the file that holds it; empty without an index of these files.

    Folders of converted models often keep the index of their source. Such an index names none of
    the files that are there, and says nothing about them.
    """
    path = folder / INDEX_FILE
    if not path.is_file():
        return {}
    try:
        index = json.loads(path.read_bytes())["weight_map"]
        is_map = isinstance(index, dict) and all(isinstance(file, str) for file in index.values())
    except (*NO_JSON, KeyError, TypeError):
        is_map = False
    if not is_map:
        log.warning("ignoring `%s`: it does not map tensor names to files", path)
        return {}
    is_here = not {file.name for file in weight_files(folder)}.isdisjoint(index.values())
    return index if is_here else {}


def choosing_index(folder: Path) -> list[Path]:
    """Return the index of a folder if it names only some of the files with weights."""
    named = {*shard_index(folder).values()}
    is_choice = any(path.name not in named for path in weight_files(folder))
    return [folder / INDEX_FILE] if named and is_choice else []
