"""A work directory, and a stage in it."""

from pathlib import Path

import pytest
from stage_folders import commit, opened

from exl2flow.core.store.store import StageFolder, StageRef, WorkDir


@pytest.fixture
def work(tmp_path: Path) -> WorkDir:
    return WorkDir(tmp_path / "work")


@pytest.fixture
def ref(work: WorkDir) -> StageRef:
    return work.ref("measure", "0123456789abcdef" * 4)


@pytest.fixture
def completed(work: WorkDir, ref: StageRef) -> StageFolder:
    """A finished stage of two files."""
    folder = opened(work, ref)
    for name in ("a", "b"):
        commit(folder, name, f"content of {name}")
    folder.complete()
    return folder
