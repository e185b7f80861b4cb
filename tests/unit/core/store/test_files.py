"""Files are whole or absent, and known by their digests."""

import fcntl
import hashlib
import json
import os
import re
import resource
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file

from exl2flow.core.errors import CorruptCheckpoint, ReadFailed, WriteFailed
from exl2flow.core.store.files import (
    DTYPE_NAMES,
    FileRecord,
    digest,
    digest_of,
    exclusive,
    lock,
    make_private_folder,
    read_json,
    read_metadata,
    read_tensors,
    replacing,
    safetensors_header,
    sync_files,
    tensor_bytes,
    unreadable,
    write_json,
    write_layout,
    write_tensors,
    write_text,
)

KILLED = """
import os, sys
from pathlib import Path
from exl2flow.core.store.files import replacing

with replacing(Path(sys.argv[1])) as file:
    file.write(b"half of the new con" * 10_000)
    os.kill(os.getpid(), 9)
"""


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let this process write no file beyond `size` bytes; pytest's own output may be one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_appears_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"

    with replacing(path) as file:
        file.write(b"content")
        during = path.exists()

    assert not during
    assert path.read_bytes() == b"content"
    assert names(path.parent) == ["file"]


def test_only_private_files_ignore_the_umask_and_keep_permissions(tmp_path: Path) -> None:
    def written(name: str, **options: bool) -> str:
        write_json(tmp_path / name, {}, **options)
        return oct((tmp_path / name).stat().st_mode)[-3:]

    before = os.umask(0o022)
    try:
        first = [written("usual"), written("private", is_private=True)]
        for name in ("usual", "private"):
            (tmp_path / name).chmod(0o640)
        second = [written("usual"), written("private", is_private=True)]
    finally:
        os.umask(before)

    assert (first, second) == (["644", "600"], ["644", "640"])


def test_content_is_flushed_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    seen: list[tuple[bool, str]] = []
    flush = os.fsync

    def spy(handle: int) -> None:
        seen.append((stat.S_ISDIR(os.fstat(handle).st_mode), path.read_text()))
        flush(handle)

    monkeypatch.setattr(os, "fsync", spy)

    write_text(path, "new")

    assert seen == [(False, "old"), (True, "new")]


def test_files_of_other_libraries_are_flushed_before_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a" / "first", tmp_path / "a" / "second", tmp_path / "b" / "third"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")
    seen = list[Path]()
    flush = os.fsync

    def spy(handle: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        flush(handle)

    monkeypatch.setattr(os, "fsync", spy)

    sync_files(iter(paths))

    assert seen[:3] == paths
    assert sorted(seen[3:]) == [tmp_path / "a", tmp_path / "b"]


@pytest.mark.parametrize("is_there", [False, True])
def test_nobody_else_looks_into_a_private_folder(is_there: bool, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "private"
    if is_there:
        folder.mkdir(parents=True, mode=0o777)

    make_private_folder(folder)

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_lock_of_a_file_is_held_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"

    with lock(path), pytest.raises(BlockingIOError):
        lock(path, fcntl.LOCK_NB)

    lock(path, fcntl.LOCK_NB).close()
    assert names(path.parent) == ["file.lock"]


def test_changes_of_a_file_by_several_writers_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_text("")

    def add(number: int) -> None:
        with exclusive(path):
            before = path.read_text()
            time.sleep(0.002)
            path.write_text(f"{before}{number}\n")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(16)))

    assert sorted(map(int, path.read_text().split())) == [*range(16)]


@pytest.mark.parametrize(
    ("error", "why"),
    [(OSError(5, "Input/output error", "name"), "Input/output error"), (OSError("odd"), "odd")],
)
def test_file_that_cannot_be_read_is_named_with_the_reason(error: OSError, why: str) -> None:
    assert str(unreadable(Path("a/b"), error)).startswith(f"cannot read `a/b`: {why}; check ")


def test_failed_block_leaves_the_old_file_and_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write_and_stop() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()

    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_killed_writer_leaves_the_old_file_and_what_the_next_one_removes(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / ".file2.0.partial"
    path.write_text("old")

    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=120)

    assert killed.returncode == -9
    assert path.read_text() == "old"
    leftover, kept = names(tmp_path)
    assert re.fullmatch(r"\.file\.[0-9a-f]{8}\.partial", leftover)
    assert kept == "file"
    other.touch()
    write_text(path, "new")
    assert names(tmp_path) == [other.name, "file"]


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {})

    def write(size: int) -> None:
        for _ in range(40):
            write_json(path, {str(key): "x" * 64 for key in range(size)})

    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(write, size) for size in (40, 80)]
        while not all(writer.done() for writer in writers):
            assert len(read_json(path)) in (0, 40, 80)  # never half a file
        for writer in writers:
            writer.result()

    assert names(tmp_path) == ["file.json"]


def test_files_are_as_readable_as_the_user_has_them_by_default(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_text(tmp_path / "file", "text")
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


def test_error_of_reading_inside_the_block_does_not_blame_the_target(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Is a directory") as found, replacing(tmp_path / "b"):
        (tmp_path).read_bytes()

    assert not isinstance(found.value, WriteFailed)
    assert names(tmp_path) == []


def test_file_name_that_is_not_utf8_is_recorded_and_digested(tmp_path: Path) -> None:
    name = os.fsdecode(b"a\xff")

    write_json(tmp_path / "a.json", {"out": name})

    assert read_json(tmp_path / "a.json") == {"out": name}
    assert digest_of(name) != digest_of(os.fsdecode(b"a\xfe"))


def test_unreadable_file_is_not_reported_as_missing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()

    for read in (read_json, read_metadata, read_tensors):
        with pytest.raises(ReadFailed, match=r"cannot read `.*/a`: .*; check the disk"):
            read(tmp_path / "a")


def test_full_disk_leaves_the_old_file_and_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    with (
        pytest.raises(WriteFailed, match=r"cannot write `.*file`: File too large; free space"),
        file_size_limit(4096),
    ):
        write_text(path, "x" * 4097)

    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("folder", ["file", "/proc/missing"])
def test_folder_that_cannot_be_made_is_a_named_error(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(WriteFailed, match=r"a\.json`: `.*(file|missing)` is not a folder; choose"):
        write_json(tmp_path / folder / "a.json", {})


def test_digest_is_the_sha256_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 100_000)

    assert digest(tmp_path / "a") == hashlib.sha256(b"abc" * 100_000).hexdigest()


def test_digest_of_values_ignores_key_order_and_nothing_else() -> None:
    value = {"a": 1, "b": [1, 2.5, None, "ü"]}

    assert digest_of(value) == digest_of({"b": [1, 2.5, None, "ü"], "a": 1})
    text = '{"a":1,"b":[1,2.5,null,"ü"]}'  # digests of earlier versions stay valid
    assert digest_of(value) == hashlib.sha256(text.encode()).hexdigest()
    others = [{"a": 1}, {**value, "a": "1"}, {**value, "b": [2.5, 1, None, "ü"]}, {**value, "a": 2}]
    assert len({digest_of(other) for other in [value, *others]}) == 5


def test_json_round_trip_keeps_text_as_it_is(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"name": "größe", "items": [1, None, 0.5]})

    assert read_json(tmp_path / "a.json") == {"name": "größe", "items": [1, None, 0.5]}
    assert '\n    "name": "größe"' in (tmp_path / "a.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [None, "", "{", b"\xff\xfe{}"])
def test_unreadable_json_is_named(content: str | bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a.json").write_bytes(content if isinstance(content, bytes) else b"{")

    with pytest.raises(CorruptCheckpoint, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_untouched_file_matches_its_record_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("content")

    record = FileRecord.of(path, sha256="not its digest")

    assert record.matches(path)


def test_touched_file_matches_by_digest_only(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("content")
    known = FileRecord.of(path, sha256=digest(path))
    unknown = FileRecord.of(path, sha256=None)

    os.utime(path, ns=(1, 1))

    assert known.matches(path)
    assert not unknown.matches(path)


def test_file_altered_in_place_with_its_time_set_back_does_not_match(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("content")
    record = FileRecord.of(path, sha256=digest(path))

    path.write_text("c0ntent")
    os.utime(path, ns=(record.mtime_ns, record.mtime_ns))

    assert path.stat().st_mtime_ns == record.mtime_ns
    assert not record.matches(path)


@pytest.mark.parametrize("damage", ["truncate", "extend", "delete", "folder"])
def test_damaged_file_does_not_match(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("content")
    record = FileRecord.of(path, sha256=digest(path))

    if damage in ("truncate", "extend"):
        path.write_text("content"[:3] if damage == "truncate" else "content and more")
    else:
        path.unlink()
    if damage == "folder":
        path.mkdir()

    assert not record.matches(path)


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [({"size": "7"}, True), ({"sha256": 5}, True), ({"mtime_ns": 1.0}, True), ({"new": 8}, False)],
    ids=str,
)
def test_record_may_have_more_fields_but_no_values_of_other_types(
    change: dict[str, object], is_refused: bool
) -> None:
    record = FileRecord(sha256="0" * 64, size=7, mtime_ns=1, ctime_ns=1)
    stored = record.model_dump() | change

    with pytest.raises(ValidationError) if is_refused else nullcontext():
        assert FileRecord.model_validate_json(json.dumps(stored)) == record


def test_file_that_cannot_be_read_is_not_reported_as_changed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("content")
    record = FileRecord.of(path, sha256=digest(path))
    path.unlink()
    path.symlink_to(path)

    with pytest.raises(ReadFailed, match=r"cannot read `.*/a`: Too many levels of symbolic links"):
        record.matches(path)


def test_header_and_layout_predict_every_byte(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(12).reshape(3, 4).to(dtype) for dtype in DTYPE_NAMES}
    tensors["empty"] = torch.zeros(0, 5)
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    header = safetensors_header(layout, {"format": "pt"})

    sha256 = write_layout(
        tmp_path / "a.safetensors", layout, iter(tensors.values()), metadata={"format": "pt"}
    )

    written = (tmp_path / "a.safetensors").read_bytes()
    assert written == header + b"".join(bytes(tensor_bytes(t)) for t in tensors.values())
    assert sha256 == hashlib.sha256(written).hexdigest()
    assert len(header) % 8 == 0


def test_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(5, 3)}
    tensors |= {str(dtype): torch.arange(7).to(dtype) for dtype in DTYPE_NAMES}

    write_tensors(tmp_path / "a.safetensors", tensors, metadata={"what": "ever"})

    read = load_file(tmp_path / "a.safetensors")
    assert set(read) == {*tensors}
    assert all(read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        torch.testing.assert_close(read[name], tensor, rtol=0, atol=0)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"what": "ever"}


def test_views_are_stored_by_content(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4)

    write_tensors(tmp_path / "a.safetensors", {"transposed": matrix.T, "column": matrix[:, 1]})

    read = read_tensors(tmp_path / "a.safetensors")
    assert read["transposed"].tolist() == matrix.T.tolist()
    assert read["column"].tolist() == [1.0, 5.0, 9.0]


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(9), "b": torch.ones(2, 2)}

    first, second = (write_tensors(tmp_path / name, tensors) for name in ("x", "y"))

    assert first == second
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, 3), torch.zeros(6), torch.zeros(3, 2, dtype=torch.float16)]
)
def test_tensor_that_is_not_laid_out_as_planned_leaves_no_file(
    tensor: torch.Tensor, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="`a` is not laid out as planned"):
        write_layout(tmp_path / "x", {"a": (torch.float32, (3, 2))}, [tensor])

    assert names(tmp_path) == []


@pytest.mark.parametrize("keep", [0, 7, 60, -1])
def test_damaged_tensors_are_a_corrupt_checkpoint(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.zeros(50)}, metadata={"x": "y"})
    path.write_bytes(path.read_bytes()[:keep])

    for read in (read_tensors, read_metadata):
        with pytest.raises(CorruptCheckpoint, match=r"a\.safetensors"):
            read(path)


def test_missing_tensors_are_a_corrupt_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="nowhere"):
        read_tensors(tmp_path / "nowhere")


def test_metadata_is_read_without_the_tensors(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"a": torch.zeros(3)}, metadata={"report": "{}"})

    assert read_metadata(tmp_path / "a") == {"report": "{}"}


def test_the_digest_of_a_json_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    sha256 = write_json(tmp_path / "a.json", {"a": ["ö"] * 5000})

    assert sha256 == digest(tmp_path / "a.json")
