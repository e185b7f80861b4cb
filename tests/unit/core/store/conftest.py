"""A work directory, a stage in it, and a conversion of toy stages, none of which has run yet."""

from pathlib import Path

import pytest
import toy_conversions
import toy_stages
from stage_folders import commit, opened

from exl2flow.core.options.config import ConversionConfig
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


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    toy_stages.RAN.clear()
    toy_conversions.RAN.clear()
    toy_conversions.FAILING.clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "work"


@pytest.fixture
def config(tmp_path: Path) -> ConversionConfig:
    source = toy_conversions.model(tmp_path / "model")
    return ConversionConfig(source=source, out=tmp_path / "out")
