"""Stage folders that cannot be resumed: refused or set aside, never deleted."""

import errno
import os
from pathlib import Path

import pytest
import torch
from stage_folders import commit, opened

from exl2flow.core.errors import ReadFailed, StoreError, WriteFailed
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.store import files
from exl2flow.core.store.files import digest, digest_of, write_json, write_text
from exl2flow.core.store.manifest import RunRecord
from exl2flow.core.store.store import StageFolder, StageRef, WorkDir


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
    assert f"kept as `{kept}`" in caplog.text


def test_folder_that_cannot_be_set_aside_is_a_named_error_and_stays(
    completed: StageFolder, work: WorkDir, ref: StageRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    (completed.path / "manifest.json").write_text("")

    def failing(path: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", failing)

    with pytest.raises(WriteFailed, match=rf"cannot set `{completed.path}` aside: Permission den"):
        opened(work, ref)

    assert (completed.path / "a").read_text() == "content of a"
    assert (completed.path / "manifest.json").read_text() == ""


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


def test_a_run_is_recorded_with_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    config = RefinementConfig.model_validate(
        {"model": "m", "source": "s", "out": "o", "calibration": {"text": "text.txt"}}
    )

    record = RunRecord.of(["judge"], config)

    assert record.stages == ["judge"]
    options = record.config
    assert [options[name] for name in ("model", "source", "out")] == [
        str(tmp_path / name) for name in "mso"
    ]
    assert options["work_root"] is None
    assert options["calibration"]["text"] == str(tmp_path / "text.txt")
    assert options["validate_options"]["text"] is None
