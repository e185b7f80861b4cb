"""Locks of work directories and outputs: what they hold, and disks that cannot lock folders."""

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from exl2flow.core.store.store import WorkDir


@pytest.fixture
def work(tmp_path: Path) -> WorkDir:
    return WorkDir(tmp_path / "work")


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_lock_names_only_its_holder(work: WorkDir) -> None:
    work.root.mkdir()
    (work.root / "lock").write_text("9" * 20)  # of an earlier one

    with work.lock():
        assert (work.root / "lock").read_text() == str(os.getpid())


def test_output_is_locked_on_a_file_system_that_locks_no_folders(
    work: WorkDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, before, refused = tmp_path / "out", handles(), list[int]()
    flock = fcntl.flock

    def files_only(handle: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            refused.append(handle)
            raise OSError(errno.ENOLCK, "No locks available")
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", files_only)
    with work.lock_output(out):
        (out / "file").touch()

    assert len(refused) == 1
    assert (out / "file").exists()
    assert handles() == before
