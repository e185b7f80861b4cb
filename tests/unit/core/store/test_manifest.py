"""The manifest of a stage folder: its defaults, its record of the run, its versions."""

import platform
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from exl2flow.core.errors import CorruptCheckpoint
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.store.files import FileRecord
from exl2flow.core.store.manifest import RunRecord, SavedStates, StageManifest, versions


def manifest(**more: object) -> StageManifest:
    given = {
        "stage": "measure",
        "schema_version": 1,
        "fingerprint": "f",
        "inputs": {},
        "options": {},
        "device": "cpu",
    }
    return StageManifest.model_validate({**given, **more})


def test_a_new_manifest_has_nothing_done() -> None:
    new = manifest()

    assert (new.status, new.cursor, new.total, new.seconds) == ("partial", 0, 0, 0.0)
    assert (new.files, new.states, new.notes, new.source, new.run) == ({}, None, [], {}, None)


def test_a_sealed_manifest_is_the_same_again() -> None:
    one = manifest(cursor=3, run=RunRecord(stages=["a"], config={"bpw": 4.0}))

    assert StageManifest.unsealed(one.sealed()) == one
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        StageManifest.unsealed({**one.sealed(), "cursor": 4})
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        StageManifest.unsealed([one.sealed()])


@pytest.mark.parametrize("wrong", [{"cursor": "3"}, {"status": "done"}, {"schema_version": 1.0}])
def test_a_manifest_of_other_types_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        manifest(**wrong)


def test_records_do_not_change_and_keep_their_types() -> None:
    run = RunRecord(stages=[], config={})
    record = FileRecord(size=1, mtime_ns=2, ctime_ns=3, sha256="0" * 64)
    states = SavedStates(file="states-a.safetensors", index=0, record=record)

    for one, name in ((run, "stages"), (states, "index")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(one, name, [])
    with pytest.raises(ValidationError, match="index"):
        SavedStates(file="states-a.safetensors", index="0", record=record)
    with pytest.raises(ValidationError, match="stages"):
        RunRecord(stages=("a",), config={})


def test_all_paths_of_a_run_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    conversion = ConversionConfig.model_validate(
        {"source": "s", "out": "o", "bpw": 4.0, "work_root": "w", "measurement": "m"}
    )
    refinement = RefinementConfig.model_validate({"model": "m", "source": "s", "out": "o"})

    for config, names in (
        (conversion, ("source", "out", "work_root", "measurement")),
        (refinement, ("model", "source", "out")),
    ):
        recorded = RunRecord.of([], config).config
        given = config.model_dump(mode="json")
        assert [recorded[name] for name in names] == [str(tmp_path / given[name]) for name in names]
        assert not {"publish", "token_block"} & recorded.keys()


def test_versions_that_can_change_a_result_are_recorded() -> None:
    assert versions() == {
        "exl2flow": version("exl2flow"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
