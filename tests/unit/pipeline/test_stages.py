"""The loop over stages: order, what is skipped, what is reported as cached."""

from pathlib import Path

import pytest

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import Tick, reporting_to
from exl2flow.core.store.stage import Pipeline, Stage, StageRun
from exl2flow.pipeline.stages import ALL_STAGES, MEASURE_STAGES, run_in_order

NAMES = ("first", "second", "third")


def work(run: StageRun) -> None:
    run.tick(1, 1, "worked")


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    stages = [
        Stage(name=name, schema=1, inputs=(), options=lambda config: {}, run=work) for name in NAMES
    ]
    config = ConversionConfig(source=source, out=tmp_path / "out")
    return Pipeline(config, stages, device="cpu")


@pytest.fixture
def ticks() -> list[Tick]:
    return []


def test_stages_run_in_order_in_this_process(pipeline: Pipeline, ticks: list[Tick]) -> None:
    with reporting_to(ticks.append):
        run_in_order(pipeline)

    assert [(tick.stage, tick.detail) for tick in ticks] == [(name, "worked") for name in NAMES]
    assert all(pipeline.is_complete(name) for name in NAMES)


def test_complete_stages_are_reported_as_cached(pipeline: Pipeline, ticks: list[Tick]) -> None:
    pipeline.run("second", progress=lambda tick: None)

    with reporting_to(ticks.append):
        run_in_order(pipeline)

    assert [tick.detail for tick in ticks] == ["worked", "cached", "worked"]


def test_another_strategy_runs_every_stage_that_is_not_done(
    pipeline: Pipeline, ticks: list[Tick]
) -> None:
    ran: list[str] = []
    pipeline.run("third", progress=lambda tick: None)

    with reporting_to(ticks.append):
        run_in_order(pipeline, ran.append, done=("first",))

    assert ran == ["second", "third"]
    assert [(tick.stage, tick.detail) for tick in ticks] == [("third", "cached")]
    assert not pipeline.is_complete("second")


def test_models_of_several_targets_share_what_measures() -> None:
    names = [stage.name for stage in MEASURE_STAGES]

    assert names == ["compose", "tokenize", "sensitivity", "measure"]


def test_cleaning_may_take_tensors_that_the_output_has_too() -> None:
    removable = {stage.name for stage in ALL_STAGES if stage.removable}

    assert removable == {"mtp", "quantize", "tune", "refine"}
