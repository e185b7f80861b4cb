"""Bits that flip in files, with and without a trace in the file's times."""

import random
from pathlib import Path

from exl2flow.core.store.files import FileRecord
from exl2flow.core.store.store import StageFolder


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file; bit 0 is the lowest of the first byte."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def flip_unseen(folder: Path, name: str, bit: int) -> None:
    """Flip a bit of a stage's file as a disk does, which changes no times.

    No program can set ctime back, so the manifest is given the times of the changed file.
    """
    flip(folder / name, bit)
    found = StageFolder.load(folder)
    assert found is not None
    manifest = found.manifest
    if manifest.states is not None and manifest.states.file == name:
        record = FileRecord.of(folder / name, sha256=manifest.states.record.sha256)
        manifest.states = manifest.states.model_copy(update={"record": record})
    else:
        sha256 = manifest.files[name].sha256
        manifest.files[name] = FileRecord.of(folder / name, sha256=sha256)
    found.save()


def some_bit(path: Path, chance: random.Random) -> int:
    """Return a random bit of a file."""
    return chance.randrange(8 * path.stat().st_size)
