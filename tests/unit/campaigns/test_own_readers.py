"""What readers of a campaign accept is compared with what an independent reading says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_readers
import pytest
import server_readers
import torch
from own_readers import Digests, agrees
from reader import Reader

from exl2flow.core.store.files import digest_of
from exl2flow.core.store.manifest import CHECKSUM, StageManifest
from exl2flow.inference.report import inspection
from exl2flow.inference.report.record import read_record


def test_a_digest_that_is_believed_although_it_is_wrong_is_a_failure(tmp_path: Path) -> None:
    reader = Digests(tmp_path / "digests")
    [whole] = reader.seeds
    content = json.loads(whole)
    content.pop(CHECKSUM)
    for record in content.values():
        record["sha256"] = "0" * 64

    reader.read(whole)
    reader.read(json.dumps({**content, CHECKSUM: "0" * 64}).encode())  # is computed again
    with pytest.raises(AssertionError):
        reader.read(json.dumps({**content, CHECKSUM: digest_of(content)}).encode())


def unchecked(cls: type[StageManifest], content: dict[str, Any]) -> StageManifest:
    """Read a manifest whatever its checksum is."""
    return cls.model_validate(content)


def taken(files: object, page: object, out: memoryview) -> bool:
    """Take any file for a page."""
    return True


def other_figures(folder: Path) -> object:
    """Read a record, with another figure in it."""
    record = read_record(folder)
    if record is not None:
        object.__setattr__(record, "predicted_kl", 0.7)
    return record


@pytest.mark.parametrize(
    ("kind", "owner", "name", "wrong"),
    [
        (own_readers.Manifest, StageManifest, "unsealed", classmethod(unchecked)),
        (own_readers.Checkpoint, own_readers, "read_metadata", lambda path: {"report": "[]"}),
        (own_readers.Checkpoint, own_readers, "read_tensors", lambda p: {"states": torch.ones(1)}),
        (own_readers.Entries, own_readers, "read_entries", lambda path: []),
        (own_readers.Provenance, own_readers, "provenance", lambda path: {"repo": "other"}),
        (own_readers.Record, inspection, "read_record", other_figures),
        (server_readers.PageFile, server_readers.PageFiles, "read", taken),
    ],
)
def test_what_is_read_wrongly_is_a_failure(
    kind: type[Reader],
    owner: Any,
    name: str,
    wrong: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = kind(tmp_path / "reader")
    reader.read(reader.seeds[0])
    monkeypatch.setattr(owner, name, wrong)

    with pytest.raises(AssertionError):
        reader.read(reader.seeds[0].replace(b'"cursor": 1', b'"cursor": 2'))


def test_a_file_is_read_as_it_is() -> None:
    assert agrees({"a": [1, 2.0], "new": 1}, {"a": [1, 2], "later": 3})
    assert agrees(float("nan"), float("nan"))
    assert not agrees({"a": 3}, {"a": "3"})
    assert not agrees([1, 2], [1])
    assert not agrees(None, float("inf"))
