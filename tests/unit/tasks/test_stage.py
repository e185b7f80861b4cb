from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from prefect import Task
from prefect.client.schemas import TaskRun
from prefect.states import Failed

from exl2flow.core.errors import Exl2FlowError, NonFiniteState
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.stage import Pipeline, Stage
from exl2flow.pipeline.stages import STAGES
from exl2flow.tasks.artifacts import Artifacts
from exl2flow.tasks.retries import is_retryable
from exl2flow.tasks.stage import publish_outlook, stage_task


class Away(Exl2FlowError):
    """Something that may come back."""

    retryable = True


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    config = ConversionConfig(source=source, out=tmp_path / "out")
    stage = Stage(name="one", schema=1, inputs=(), options=lambda config: {}, run=lambda run: None)
    return Pipeline(config, [stage], device="cpu")


SPEED = {"allocate": {"prefer": "speed"}}


class Tables(Artifacts):
    """Keeps tables instead of sending them to a server."""

    def __init__(self) -> None:
        super().__init__("model")
        self.kept: dict[str, list[dict[str, str]]] = {}

    def table(self, name: str, rows: Sequence[Mapping[str, str]], description: str) -> None:
        self.kept[name] = [dict(row) for row in rows]


def test_page_of_a_first_run_has_no_changes(pipeline: Pipeline) -> None:
    tables = Tables()

    publish_outlook(pipeline, tables, ())

    assert tables.kept == {}


def test_page_of_a_later_run_says_what_changed(pipeline: Pipeline) -> None:
    pipeline.run("one", progress=silent)
    newer = replace(pipeline.stages["one"], schema=2)
    tables, skipped = Tables(), Tables()

    later = Pipeline(pipeline.config, [newer], device="cpu")
    publish_outlook(later, tables, ())
    publish_outlook(later, skipped, ["one"])

    why = "code of `one` schema 1 -> schema 2"
    assert tables.kept == {"why": [{"stage": "one", "state": "again", "why": why}]}
    assert skipped.kept == {}


def test_stages_run_in_the_documented_order() -> None:
    names = [stage.name for stage in STAGES]

    before = ["compose", "tokenize", "sensitivity", "measure", "allocate"]
    assert names == [*before, "quantize", "tune", "mtp", "compile", "validate"]


@pytest.mark.parametrize(
    ("values", "left_out"),
    [
        ({}, ["compose", "tune", "mtp"]),
        ({"calibration": {"text": "self"}}, ["tune", "mtp"]),
        ({"quality": "best"}, ["compose", "mtp"]),
        ({"quality": "exllamav2"}, ["compose", "sensitivity", "tune", "mtp"]),
        ({"measurement": "measurement.json"}, ["compose", "measure", "tune", "mtp"]),
        ({**SPEED, "bpw": 3.0}, ["compose", "tune", "mtp"]),
    ],
    ids=str,
)
def test_a_configuration_has_the_stages_that_it_needs(
    values: dict[str, object], left_out: list[str]
) -> None:
    config = ConversionConfig.model_validate({"source": "model", "out": "out", **values})

    assert [stage.name for stage in STAGES if not stage.enabled(config)] == left_out


def test_task_is_cached_under_its_fingerprint_alone(pipeline: Pipeline) -> None:
    task = stage_task(pipeline, "one", Artifacts("model"))

    assert task.name == "one"
    assert task.cache_key_fn is not None
    key = task.cache_key_fn(cast("object", None), {})  # type: ignore[arg-type]  # not looked at
    assert key == f"one-{pipeline.refs['one'].fingerprint}"


def test_cache_is_passed_over_until_the_folder_is_complete(pipeline: Pipeline) -> None:
    assert stage_task(pipeline, "one", Artifacts("model")).refresh_cache is True

    pipeline.run("one", progress=lambda tick: None)

    assert stage_task(pipeline, "one", Artifacts("model")).refresh_cache is False


@pytest.mark.parametrize(
    ("error", "expected"),
    [(Away("away"), True), (NonFiniteState("NaN"), False), (ValueError("defect"), False)],
)
def test_only_retryable_errors_are_retried(error: Exception, expected: bool) -> None:
    nothing = cast("Task[..., None]", None)
    run = cast("TaskRun", None)

    assert is_retryable(nothing, run, Failed(data=error)) is expected
