"""Locks of work directories, stages and outputs: who holds them, and disks that cannot lock."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from exl2flow.core.errors import WorkDirBusy
from exl2flow.core.store.store import StageRef, WorkDir

HOLD = """
import sys
from pathlib import Path
from exl2flow.core.store.store import WorkDir

with WorkDir(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


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


def test_second_owner_is_refused_with_the_process_id_of_the_first(work: WorkDir) -> None:
    with (
        work.lock(),
        pytest.raises(WorkDirBusy, match=rf"process {os.getpid()} is .*another `--work-root`"),
        WorkDir(work.root).lock(),
    ):
        pytest.fail("the lock was given twice")


def test_lock_is_free_again_after_the_block(work: WorkDir) -> None:
    for _ in range(2):
        with work.lock():
            assert (work.root / "lock").read_text() == str(os.getpid())


def test_lock_of_a_killed_process_is_free(work: WorkDir) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(work.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(WorkDirBusy, match=f"process {holder.pid}"), work.lock():
            pytest.fail("the lock was given twice")
        holder.kill()

    with work.lock():
        assert (work.root / "lock").read_text() == str(os.getpid())


def test_whole_directory_is_refused_with_the_process_that_has_a_stage(
    work: WorkDir, ref: StageRef
) -> None:
    with (
        work.lock_stage(ref, None),
        pytest.raises(WorkDirBusy, match=rf"process {os.getpid()} is working in `{work.root}`"),
        work.lock(),
    ):
        pytest.fail("the lock was given twice")


def test_stages_of_one_directory_are_locked_one_by_one(work: WorkDir, ref: StageRef) -> None:
    other = work.ref("measure", "f" * 64)
    with (
        work.lock_stage(ref, None),
        work.lock_stage(other, None),
        pytest.raises(WorkDirBusy),
        work.lock_stage(ref, None),
    ):
        pytest.fail("the lock was given twice")
    with work.lock():
        pass


@pytest.mark.parametrize("mode", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_owner_that_has_not_written_its_number_is_unknown(mode: int, work: WorkDir) -> None:
    work.root.mkdir()
    with (work.root / "lock").open("wb") as file:
        fcntl.flock(file, mode)
        with pytest.raises(WorkDirBusy, match="process unknown is working"), work.lock():
            pytest.fail("the lock was given twice")


@pytest.mark.parametrize("content", [None, "written before", "written meanwhile"])
def test_output_folder_is_there_while_it_is_locked_and_stays_if_it_is_used(
    content: str | None, work: WorkDir, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out"
    if content == "written before":
        out.mkdir(parents=True)

    with work.lock_output(out):
        assert out.is_dir()
        if content == "written meanwhile":
            (out / "file").touch()

    assert out.is_dir() == (content is not None)


def test_output_that_is_refused_leaves_no_handle(work: WorkDir, tmp_path: Path) -> None:
    out, other = tmp_path / "out", WorkDir(tmp_path / "other")
    with work.lock_output(out):
        before = handles()
        for _ in range(3):
            with (
                pytest.raises(WorkDirBusy, match=rf"another process .*`{out}`.*another `--out`"),
                other.lock_output(out),
            ):
                pytest.fail("the lock was given twice")
        assert handles() == before


def test_output_folder_that_its_owner_removes_meanwhile_is_made_again(
    work: WorkDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, before, removed = tmp_path / "out", handles(), list[Path]()
    flock = fcntl.flock

    def removing(handle: int, how: int) -> None:
        if not removed and out.exists():
            out.rmdir()  # between opening and locking
            removed.append(out)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", removing)
    with work.lock_output(out):
        assert out.is_dir()
        with pytest.raises(WorkDirBusy), WorkDir(tmp_path / "other").lock_output(out):
            pytest.fail("the lock was given twice")

    assert removed
    assert not out.exists()
    assert handles() == before
