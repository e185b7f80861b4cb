"""A work root that version 0.1.0 wrote, before its folders were divided, is continued.

`sensitivity` (3), `measure` (8) and `quantize` (8) have had other schemas since: they and what
follows begin anew.
"""

import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversions import small_config, snapshot
from prefect.serializers import JSONSerializer

from exl2flow.core.store.stage import Stage
from exl2flow.core.store.store import StageRef
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.local import run_locally
from exl2flow.pipeline.stages import STAGES

# a tiny model, and its work root with the finished stages up to `quantize`
STORED = Path(__file__).with_name("work_root.tar.xz")
FINISHED = ("tokenize", "sensitivity", "measure", "allocate", "quantize")
THEN: dict[str, dict[str, Any]] = {
    "measure": {"schema": 7},
    "quantize": {"schema": 7},
    "sensitivity": {
        "schema": 1,
        "options": lambda config: {
            **config.sensitivity.model_dump(),
            "rope": config.rope.model_dump(),
        },
    },
}
STAGES_THEN = [replace(stage, **THEN.get(stage.name, {})) for stage in STAGES]


@pytest.mark.parametrize(
    ("stages", "finished"), [(STAGES, FINISHED[:1]), (STAGES_THEN, FINISHED)], ids=["now", "then"]
)
def test_stages_of_a_stored_work_root_are_finished_and_the_others_follow(
    stages: Sequence[Stage[Any]], finished: Sequence[str], tmp_path: Path
) -> None:
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter="data")
    config = small_config(tmp_path / "model", tmp_path / "out", work_root=tmp_path / "work")
    pipeline = open_pipeline(config, stages)
    assert [name for name in pipeline.stages if pipeline.is_complete(name)] == [*finished]
    folders = [pipeline.path(name) for name in finished]
    before = [snapshot(folder) for folder in folders]

    run_locally(config, stages=stages)

    assert [snapshot(folder) for folder in folders] == before
    assert (config.out / "model.safetensors").is_file()


def test_results_that_prefect_stored_are_read() -> None:
    stored = (
        b'{"__class__":"exl2flow.core.store.StageRef","data":'
        b'{"stage":"tokenize","fingerprint":"c5faa36e","path":"tokenize/c5faa36e"}}'
    )

    ref = JSONSerializer().loads(stored)

    assert ref == StageRef(stage="tokenize", fingerprint="c5faa36e", path="tokenize/c5faa36e")
