"""Readers of an output and the conversion that writes it keep out of each other's way."""

import fcntl
from pathlib import Path

import pytest

from exl2flow.core.errors import WorkDirBusy
from exl2flow.core.store.reading import reading
from exl2flow.core.store.store import WorkDir


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_output_that_is_written_is_not_read(out: Path, tmp_path: Path) -> None:
    with (
        WorkDir(tmp_path / "work").lock_output(out),
        pytest.raises(WorkDirBusy, match=f"writing into `{out}`"),
        reading([out]),
    ):
        pytest.fail("it is written")


def test_output_that_is_read_is_not_written(out: Path, tmp_path: Path) -> None:
    with (
        reading([out, out]),
        reading([out]),
        pytest.raises(WorkDirBusy),
        WorkDir(tmp_path / "work").lock_output(out),
    ):
        pytest.fail("it is read")
    with WorkDir(tmp_path / "work").lock_output(out):
        pass


def test_missing_folders_and_those_that_cannot_be_locked_are_read(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(handle: int, how: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refused)

    with reading([out, tmp_path / "missing"]):
        assert not (tmp_path / "missing").exists()
