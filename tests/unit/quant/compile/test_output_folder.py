"""Which folders a conversion may write into."""

import json
from pathlib import Path

import pytest
from tiny import make_tiny

from exl2flow.core.errors import ReadFailed, StoreError
from exl2flow.core.store.source import SourceFingerprint
from exl2flow.quant.compile.stage import RECORD_FILE, check_output_folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model")


@pytest.mark.parametrize("state", ["absent", "empty", "own", "begun"])
def test_absent_empty_and_own_folders_are_taken(state: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if state != "absent":
        out.mkdir()
    if state == "own":
        (out / RECORD_FILE).write_text(json.dumps({"source": str((tmp_path / "model").resolve())}))

    if state == "begun":  # by a writer that was killed
        (out / f".{RECORD_FILE}.0.partial").touch()

    check_output_folder(out, tmp_path / "model", memory=tmp_path / "digests.json")


def test_folder_whose_record_cannot_be_read_is_not_called_foreign(tmp_path: Path) -> None:
    (tmp_path / RECORD_FILE).mkdir()

    with pytest.raises(ReadFailed, match="check the disk"):
        check_output_folder(tmp_path, tmp_path / "model", memory=tmp_path / "digests.json")


@pytest.mark.parametrize("record", ['{"source": "/elsewhere"}', "{}", "[]", "broken"])
def test_folder_of_another_source_is_refused(record: str, tmp_path: Path) -> None:
    (tmp_path / RECORD_FILE).write_text(record)

    with pytest.raises(StoreError, match="choose another `--out` or delete it"):
        check_output_folder(tmp_path, tmp_path / "model", memory=tmp_path / "digests.json")


def test_record_without_a_digest_is_not_called_another_model(tmp_path: Path) -> None:
    (tmp_path / RECORD_FILE).write_text('{"source": "/elsewhere"}')

    with pytest.raises(StoreError, match=r"`/elsewhere`, and its record does not tell"):
        check_output_folder(tmp_path, tmp_path / "model", memory=tmp_path / "digests.json")


@pytest.fixture
def recorded(source: Path, tmp_path: Path) -> Path:
    """An output that says that it was made from `source`."""
    found = SourceFingerprint.of(source, memory=tmp_path / "digests.json").fingerprint
    record = {"source": str(source.resolve()), "source_fingerprint": found}
    out = tmp_path / "recorded"
    out.mkdir()
    (out / RECORD_FILE).write_text(json.dumps(record))
    return out


def test_moved_source_is_recognized_by_its_files(source: Path, recorded: Path) -> None:
    moved = source.rename(source.with_name("moved"))

    check_output_folder(recorded, moved, memory=recorded.with_name("digests.json"))


def test_output_of_another_model_names_that_one(source: Path, recorded: Path) -> None:
    moved = source.rename(source.with_name("moved"))
    (moved / "config.json").write_text("{}")

    with pytest.raises(StoreError, match=f"was made from `{source}`, not from the model in"):
        check_output_folder(recorded, moved, memory=recorded.with_name("digests.json"))


def test_other_files_in_the_same_folder_are_told(
    source: Path, recorded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (source / "config.json").write_text("{}")

    check_output_folder(recorded, source, memory=recorded.with_name("digests.json"))

    assert f"`{recorded}` was made from other files in `{source}`" in caplog.text
