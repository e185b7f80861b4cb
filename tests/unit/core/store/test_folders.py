"""Folders survive power cuts, and those that are only needed for a while do not stay."""

import os
from pathlib import Path

import pytest

from exl2flow.core.errors import WriteFailed
from exl2flow.core.store import store
from exl2flow.core.store.files import digest, write_text
from exl2flow.core.store.store import StageFolder, WorkDir

INPUTS = ["inputs/a", "inputs/b"]


def refuse(*given: object, **more: object) -> None:
    raise PermissionError(13, "Permission denied")


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


@pytest.fixture
def folder(tmp_path: Path) -> StageFolder:
    """The folder of a stage with two files that are needed for a while."""
    work = WorkDir(tmp_path / "work")
    ref = work.ref("measure", "0123456789abcdef" * 4)
    folder = work.open(ref, schema=1, inputs={}, options={}, device="cpu")
    for name in INPUTS:
        write_text(folder.path / name, "text")
        folder.commit(name, digest(folder.path / name))
    return folder


def test_removed_files_stay_removed_after_a_power_cut(
    folder: StageFolder, flushed: list[Path]
) -> None:
    folder.remove([*INPUTS, "inputs/none"])

    assert flushed[-1] == folder.path / "inputs"  # behind the manifest, which names none of them
    assert folder.manifest.files == {}
    assert not any((folder.path / "inputs").iterdir())


def test_files_stay_if_the_manifest_cannot_forget_them(
    folder: StageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> None:
        raise WriteFailed("no space left")

    monkeypatch.setattr(store, "write_json", fails)
    with pytest.raises(WriteFailed):
        folder.remove(INPUTS)

    assert all((folder.path / name).exists() for name in INPUTS)


def test_files_that_the_manifest_has_forgotten_are_deleted_by_the_next_call(
    folder: StageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refuse)
        with pytest.raises(WriteFailed):
            folder.remove(INPUTS)
    assert all((folder.path / name).exists() for name in INPUTS)

    folder.remove(INPUTS)

    assert not any((folder.path / "inputs").iterdir())
