"""Stage folders: commits, resumption, and the lock of a work directory."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from exl2flow.core import files, store
from exl2flow.core.errors import ReadFailed, StoreError, WorkDirBusy, WriteFailed
from exl2flow.core.files import digest, digest_of, write_json, write_text
from exl2flow.core.store import StageFolder, StageRef, WorkDir

HOLD = """
import sys
from pathlib import Path
from exl2flow.core.store import WorkDir

with WorkDir(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def work(tmp_path: Path) -> WorkDir:
    return WorkDir(tmp_path / "work")


@pytest.fixture
def ref(work: WorkDir) -> StageRef:
    return work.ref("measure", "0123456789abcdef" * 4)


def opened(work: WorkDir, ref: StageRef, *, device: str = "cpu") -> StageFolder:
    return work.open(ref, schema=1, inputs={"tokenize": "f"}, options={"bpw": 4}, device=device)


def commit(folder: StageFolder, name: str, text: str, *, cursor: int | None = None) -> None:
    write_text(folder.path / name, text)
    folder.commit(name, digest(folder.path / name), cursor=cursor)


@pytest.fixture
def completed(work: WorkDir, ref: StageRef) -> StageFolder:
    """A finished stage of two files."""
    folder = opened(work, ref)
    for name in ("a", "b"):
        commit(folder, name, f"content of {name}")
    folder.complete()
    return folder


def test_reference_names_stage_and_beginning_of_the_fingerprint(work: WorkDir) -> None:
    ref = work.ref("measure", "0123456789abcdef" * 4)

    assert ref.path == "measure/0123456789abcdef"
    assert work.path(ref) == work.root / "measure" / "0123456789abcdef"


def test_manifest_records_what_the_stage_was_for(work: WorkDir, ref: StageRef) -> None:
    manifest = opened(work, ref).manifest

    loaded = StageFolder.load(work.path(ref), ref.fingerprint)
    assert loaded is not None
    assert loaded.manifest == manifest
    assert (manifest.stage, manifest.fingerprint, manifest.schema_version) == (
        "measure",
        ref.fingerprint,
        1,
    )
    assert (manifest.inputs, manifest.options, manifest.device) == (
        {"tokenize": "f"},
        {"bpw": 4},
        "cpu",
    )
    assert manifest.versions["torch"] == str(torch.__version__)


def test_stage_is_complete_only_after_its_end(work: WorkDir, ref: StageRef) -> None:
    absent = work.is_complete(ref)
    folder = opened(work, ref)
    commit(folder, "a", "content", cursor=1)
    partial = work.is_complete(ref)

    folder.complete()

    assert (absent, partial, work.is_complete(ref)) == (False, False, True)


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("damage", ["delete", "truncate", "alter"])
def test_damaged_result_is_not_complete(
    name: str, damage: str, completed: StageFolder, work: WorkDir, ref: StageRef
) -> None:
    path = completed.path / name

    if damage == "delete":
        path.unlink()
    else:
        path.write_text("" if damage == "truncate" else path.read_text().upper())

    assert not work.is_complete(ref)
    resumed = opened(work, ref)
    assert [file for file in ("a", "b") if not resumed.valid(file)] == [name]


def test_touching_or_copying_a_result_keeps_it_complete(
    completed: StageFolder, work: WorkDir, ref: StageRef
) -> None:
    os.utime(completed.path / "a", (1, 1))
    (completed.path / "b").write_text((completed.path / "b").read_text())

    assert work.is_complete(ref)


def rewritten(folder: StageFolder, **fields: object) -> None:
    """Write other fields into a manifest, with the checksum right."""
    content = {**folder.manifest.model_dump(mode="json"), **fields}
    write_json(folder.path / "manifest.json", {**content, "checksum": digest_of(content)})


def set_aside(folder: StageFolder) -> list[Path]:
    return list(folder.path.parent.glob(f"{folder.path.name}.damaged-*"))


@pytest.mark.parametrize("content", ["", "{}", '{"stage": 1}', "not JSON", None])
def test_folder_without_an_intact_manifest_is_set_aside(
    content: str | None,
    completed: StageFolder,
    work: WorkDir,
    ref: StageRef,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (completed.path / "manifest.json").unlink()
    if content is not None:
        (completed.path / "manifest.json").write_text(content)

    assert not work.is_complete(ref)
    assert opened(work, ref).manifest.files == {}

    (kept,) = set_aside(completed)
    assert (kept / "a").read_text() == "content of a"
    assert not (completed.path / "a").exists()
    assert f"kept in `{kept}`" in caplog.text


def test_folders_set_aside_in_the_same_second_are_all_kept(
    completed: StageFolder, work: WorkDir, ref: StageRef
) -> None:
    for _ in range(3):
        (completed.path / "manifest.json").write_text("")
        opened(work, ref)

    assert len(set_aside(completed)) == 3


def test_manifest_of_a_newer_version_is_read_without_its_new_fields(
    completed: StageFolder, work: WorkDir, ref: StageRef
) -> None:
    record = completed.manifest.files["a"].model_dump()
    files = completed.manifest.model_dump(mode="json")["files"]
    rewritten(completed, host="gpu7", files={**files, "a": {**record, "blocks": 8}})

    assert work.is_complete(ref)
    assert opened(work, ref).valid("a")
    assert set_aside(completed) == []


def test_manifest_of_a_newer_schema_is_set_aside(
    completed: StageFolder, work: WorkDir, ref: StageRef
) -> None:
    rewritten(completed, status="archived")

    folder = opened(work, ref)

    (kept,) = set_aside(completed)
    assert (kept / "b").exists()
    assert folder.manifest.files == {}


def test_manifest_that_cannot_be_read_is_a_named_error_and_keeps_its_folder(
    completed: StageFolder, work: WorkDir, ref: StageRef
) -> None:
    (completed.path / "manifest.json").unlink()
    (completed.path / "manifest.json").mkdir()

    for use in (work.is_complete, lambda ref: opened(work, ref)):
        with pytest.raises(ReadFailed, match=r"manifest\.json`: Is a directory; check the disk"):
            use(ref)

    assert (completed.path / "a").exists()
    assert set_aside(completed) == []


def test_result_that_cannot_be_read_is_not_taken_for_a_lost_one(
    completed: StageFolder, work: WorkDir, ref: StageRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(completed.path / "a", (1, 1))  # so that it is read

    def failing(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "digest", failing)

    with pytest.raises(ReadFailed, match=r"`.*/a`: Input/output error"):
        work.is_complete(ref)


def test_states_that_cannot_be_deleted_are_a_named_error(work: WorkDir, ref: StageRef) -> None:
    folder = opened(work, ref)
    (folder.path / "states-a.safetensors").mkdir()

    with pytest.raises(WriteFailed, match=r"cannot delete `.*states-a\.safetensors`: Is a dir"):
        folder.complete()


@pytest.mark.parametrize(
    ("old", "new"),
    [('"status": "partial"', '"status": "complete"'), ('"cursor": 1', '"cursor": 2')],
)
def test_altered_manifest_is_not_believed(old: str, new: str, work: WorkDir, ref: StageRef) -> None:
    folder = opened(work, ref)
    commit(folder, "a", "content", cursor=1)
    path = folder.path / "manifest.json"

    altered = path.read_text().replace(old, new)
    path.write_text(altered)

    assert altered.count(new) == 1
    assert StageFolder.load(folder.path, ref.fingerprint) is None


def test_folder_of_another_fingerprint_is_not_resumed(work: WorkDir, ref: StageRef) -> None:
    commit(opened(work, ref), "a", "content")
    alike = work.ref(ref.stage, ref.fingerprint[:-1] + "0")

    folder = opened(work, alike)

    assert work.path(alike) == work.path(ref)  # paths hold the beginning only
    assert not folder.valid("a")


def test_partial_stage_is_resumed(work: WorkDir, ref: StageRef) -> None:
    first = opened(work, ref)
    commit(first, "a", "content", cursor=1)
    first.note("a remark")
    first.save()

    second = opened(work, ref)

    assert second.valid("a")
    assert (second.manifest.cursor, second.manifest.notes) == (1, ["a remark"])
    assert second.manifest.seconds >= first.manifest.seconds


@pytest.mark.parametrize(
    ("begun", "now", "way_out"),
    [
        ("cuda", "cpu", "make the GPU visible again"),
        ("cpu", "cuda", "continue with `--device cpu`"),
    ],
)
def test_partial_stage_of_another_device_class_is_refused_with_the_way_out(
    begun: str, now: str, way_out: str, work: WorkDir, ref: StageRef
) -> None:
    folder = opened(work, ref, device=begun)
    folder.manifest.total = 3
    commit(folder, "a", "content", cursor=1)

    with pytest.raises(
        StoreError, match=rf"begun on {begun} \(1 of 3 done\) .* {now}: {way_out}, or .*--restart"
    ):
        opened(work, ref, device=now)

    assert opened(work, ref, device=begun).valid("a")


def test_states_alone_keep_a_stage_on_its_device_class(work: WorkDir, ref: StageRef) -> None:
    opened(work, ref, device="cuda").save_states(torch.zeros(8), 1)

    with pytest.raises(StoreError, match="begun on cuda"):
        opened(work, ref)


def test_stage_without_results_begins_on_any_device(work: WorkDir, ref: StageRef) -> None:
    outside = work.root / "out"
    write_text(outside, "written to the output folder, which is cheap")
    folder = opened(work, ref, device="cuda")
    folder.commit(str(outside), digest(outside))
    commit(folder, "a", "content")
    (folder.path / "a").unlink()

    assert opened(work, ref).manifest.files == {}


def test_leftovers_of_killed_writers_are_removed(work: WorkDir, ref: StageRef) -> None:
    folder = opened(work, ref)
    commit(folder, "sub/a", "content")
    leftovers = [folder.path / ".a.partial", folder.path / "sub" / ".b.partial"]
    for path in leftovers:
        path.write_text("half")

    opened(work, ref)

    assert not any(path.exists() for path in leftovers)
    assert (folder.path / "sub" / "a").exists()


def test_notes_are_kept_once(work: WorkDir, ref: StageRef) -> None:
    folder = opened(work, ref)

    for _ in range(3):
        folder.note("damping x2")

    assert folder.manifest.notes == ["damping x2"]


def test_states_alternate_between_two_files(work: WorkDir, ref: StageRef) -> None:
    folder = opened(work, ref)
    states = torch.randn(2, 3, 4)
    files = []

    for index in range(3):
        folder.save_states(states + index, index)
        assert folder.manifest.states is not None
        files.append(folder.manifest.states.file)

    assert files == ["states-a.safetensors", "states-b.safetensors", "states-a.safetensors"]
    loaded = opened(work, ref).load_states()
    assert loaded is not None
    assert loaded[0] == 2
    torch.testing.assert_close(loaded[1], states + 2, rtol=0, atol=0)


def test_states_are_saved_at_most_every_interval(
    work: WorkDir, ref: StageRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(work, ref)

    early = folder.states_are_due()
    monkeypatch.setattr(store, "STATES_INTERVAL_SECONDS", 0.5)
    time.sleep(0.6)

    assert not early
    assert folder.states_are_due()
    assert not folder.states_are_due()


@pytest.mark.parametrize(
    ("seconds", "pause"), [(0.5, 20), (5, 50), (100, 300)], ids=["fast", "slow", "very slow"]
)
def test_states_that_are_slow_to_save_are_saved_less_often(
    seconds: float, pause: float, work: WorkDir, ref: StageRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(store.time, "monotonic", lambda: now)
    folder = opened(work, ref)
    write = store.write_tensors

    def slowly(*args: Any, **kwargs: Any) -> str:
        nonlocal now
        now += seconds
        return write(*args, **kwargs)

    monkeypatch.setattr(store, "write_tensors", slowly)
    folder.save_states(torch.zeros(1), 1)
    saved = now

    found = []
    for wait in (pause - 0.1, pause + 0.1):
        now = saved + wait
        found.append(folder.states_are_due())

    assert found == [False, True]


def test_altered_states_are_not_used(work: WorkDir, ref: StageRef) -> None:
    folder = opened(work, ref)
    folder.save_states(torch.zeros(8), 1)

    path = folder.path / "states-a.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")

    assert folder.load_states() is None


def test_states_go_when_the_stage_is_complete(work: WorkDir, ref: StageRef) -> None:
    folder = opened(work, ref)
    for index in range(2):
        folder.save_states(torch.zeros(8), index)

    folder.complete()

    assert sorted(path.name for path in folder.path.iterdir()) == ["manifest.json"]
    assert folder.load_states() is None


def test_second_owner_is_refused_with_the_process_id_of_the_first(work: WorkDir) -> None:
    with (
        work.lock(),
        pytest.raises(WorkDirBusy, match=rf"process {os.getpid()} is working in"),
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
