"""Folders survive power cuts, and those that are only needed for a while do not stay."""

import os
from pathlib import Path

import pytest

from exl2flow.core.store.files import digest, write_text
from exl2flow.core.store.store import WorkDir


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files and folders in the order in which they are flushed."""
    seen: list[Path] = []
    flush = os.fsync

    def spy(handle: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        flush(handle)

    monkeypatch.setattr(os, "fsync", spy)
    return seen


def test_new_folders_survive_a_power_cut_with_the_file(flushed: list[Path], tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b" / "file", "text")

    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(flushed)


def test_removed_files_stay_removed_after_a_power_cut(flushed: list[Path], tmp_path: Path) -> None:
    work = WorkDir(tmp_path / "work")
    ref = work.ref("measure", "0123456789abcdef" * 4)
    folder = work.open(ref, schema=1, inputs={}, options={}, device="cpu")
    for name in ("inputs/a", "inputs/b"):
        write_text(folder.path / name, "text")
        folder.commit(name, digest(folder.path / name))
    flushed.clear()

    folder.remove(["inputs/a", "inputs/b", "inputs/none"])

    assert flushed[0] == folder.path / "inputs"  # before the manifest forgets them
    assert flushed[-1] == folder.path
