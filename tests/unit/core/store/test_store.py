"""Stage folders: commits, resumption, and the lock of a work directory."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from stage_folders import commit, opened

from exl2flow.core.errors import StoreError
from exl2flow.core.store import store
from exl2flow.core.store.files import digest_of
from exl2flow.core.store.manifest import CHECKSUM, StageManifest
from exl2flow.core.store.source import SourceFingerprint
from exl2flow.core.store.store import StageFolder, StageRef, WorkDir


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


def test_a_text_is_not_taken_for_a_number(work: WorkDir, ref: StageRef) -> None:
    content = opened(work, ref).manifest.model_dump(mode="json")
    sealed = {**content, "cursor": "1"}

    with pytest.raises(ValidationError, match="cursor"):
        StageManifest.unsealed({**sealed, CHECKSUM: digest_of(sealed)})


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
    "record",
    [
        lambda folder: commit(folder, "a", "content", cursor=1),
        lambda folder: folder.save_states(torch.ones(8), 2),
        lambda folder: folder.complete(),
    ],
    ids=["file", "states", "end"],
)
def test_nothing_is_recorded_that_a_check_refuses(
    record: Callable[[StageFolder], None], work: WorkDir, ref: StageRef
) -> None:
    folder = opened(work, ref)
    folder.save_states(torch.zeros(8), 1)
    recorded = (folder.path / "manifest.json").read_bytes()

    def refusing() -> None:
        raise StoreError("the source has changed")

    folder.check = refusing
    with pytest.raises(StoreError, match="the source has changed"):
        record(folder)

    assert (folder.path / "manifest.json").read_bytes() == recorded
    assert opened(work, ref).load_states() is not None


def test_a_stage_counts_the_seconds_of_all_its_runs(
    work: WorkDir, ref: StageRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(store.time, "monotonic", lambda: now)
    found = []

    for start, seconds in ((1000.0, 5), (20.0, 3)):
        now = start
        folder = opened(work, ref)
        now += seconds
        folder.save()
        found.append(folder.manifest.seconds)

    assert found == [5, 8]


def test_a_file_that_is_named_twice_is_deleted(work: WorkDir, ref: StageRef) -> None:
    folder = opened(work, ref)
    commit(folder, "a", "content")

    folder.remove(["a", "a", "never written"])

    assert not (folder.path / "a").exists()
    assert folder.manifest.files == {}


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
    for wait in (pause - 0.1, pause):
        now = saved + wait
        found.append(folder.states_are_due())

    assert found == [False, True]


def test_altered_states_are_not_used(work: WorkDir, ref: StageRef) -> None:
    folder = opened(work, ref)
    folder.save_states(torch.zeros(8), 1)

    path = folder.path / "states-a.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")

    assert folder.load_states() is None


def test_states_that_a_disk_has_altered_are_named(
    work: WorkDir, ref: StageRef, caplog: pytest.LogCaptureFixture
) -> None:
    folder = opened(work, ref)
    folder.save_states(torch.zeros(8), 1)
    saved = folder.manifest.states
    assert saved is not None
    record = saved.record.model_copy(update={"sha256": "0" * 64})  # size and times agree
    folder.manifest.states = saved.model_copy(update={"record": record})

    assert folder.load_states() is None
    assert f"the saved states in `{folder.path}` are damaged" in caplog.text


def test_states_go_when_the_stage_is_complete(work: WorkDir, ref: StageRef) -> None:
    folder = opened(work, ref)
    for index in range(2):
        folder.save_states(torch.zeros(8), index)

    folder.complete()

    assert sorted(path.name for path in folder.path.iterdir()) == ["manifest.json"]
    assert folder.load_states() is None


def test_folder_of_a_source_has_its_documented_name_and_stays_when_it_is_renamed(
    tmp_path: Path,
) -> None:
    fingerprint = "0123456789abcdef" * 4
    source = SourceFingerprint(slug="a", fingerprint=fingerprint, files={})
    renamed = SourceFingerprint(slug="b", fingerprint=fingerprint, files={})
    other = SourceFingerprint(slug="b", fingerprint="f" * 64, files={})

    assert WorkDir.of(tmp_path, source).root == tmp_path / "a-0123456789ab"
    assert WorkDir.of(tmp_path, renamed).root == tmp_path / "b-0123456789ab"
    (tmp_path / "a-0123456789ab").mkdir()
    assert WorkDir.of(tmp_path, renamed).root == tmp_path / "a-0123456789ab"
    assert WorkDir.of(tmp_path, other).root == tmp_path / "b-ffffffffffff"


def test_cleared_stage_keeps_and_lists_what_is_small(
    work: WorkDir, ref: StageRef, tmp_path: Path
) -> None:
    folder = opened(work, ref)
    commit(folder, "a", "text")
    commit(folder, "b.safetensors", "tensors")
    folder.complete()

    folder.clear(tmp_path)

    loaded = StageFolder.load(folder.path)
    assert loaded is not None
    assert (loaded.manifest.status, [*loaded.manifest.files]) == ("cleared", ["a"])
    assert loaded.valid("a")
    assert folder.tensor_files() == []
    assert (work.is_cleared(ref), work.is_complete(ref)) == (True, False)


@pytest.mark.parametrize(
    ("name", "is_kept"), [("inside/", False), (".a.0.partial", False), ("inside/a", True)]
)
def test_only_a_folder_with_whole_files_is_set_aside(
    name: str, is_kept: bool, work: WorkDir, ref: StageRef
) -> None:
    path = work.path(ref) / name
    (path if name.endswith("/") else path.parent).mkdir(parents=True)
    if not name.endswith("/"):
        path.touch()

    opened(work, ref)

    assert len([*work.path(ref).parent.glob("*.damaged-2*")]) == is_kept


def test_equal_references_are_one_key(work: WorkDir, ref: StageRef) -> None:
    assert {ref: "a"}[work.ref(ref.stage, ref.fingerprint)] == "a"
    with pytest.raises(ValidationError):
        StageRef.model_validate({**ref.model_dump(), "other": 1})
