import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from resumed import Crash, after, before, crash, interrupt, results
from tiny import make_tiny
from traces import alter, delete, identities, truncate

from exl2flow.core.errors import Interrupted, StoreError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import Progress, silent
from exl2flow.core.store import store
from exl2flow.core.store.stage import Pipeline
from exl2flow.core.store.store import StageFolder
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.quantize.stage import QUANTIZE
from exl2flow.quant.walk.source_model import SourceModel
from exl2flow.quant.walk.walk import remedied

LAYERS = 2
SHAPE = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 64}
ALL = list(range(2 * LAYERS))
LONG = ["measure", "quantize"]
DAMAGES = [("measure", alter), ("quantize", delete), ("quantize", truncate)]
STOP_AFTER = 3
KINDS: dict[str, dict[str, object]] = {
    "errors": {"quality": "exllamav2"},
    "nats": {"quality": "fast", "sensitivity": {"rows": 2}},
}
UP_TO_QUANTIZE = STAGES[: STAGES.index(QUANTIZE) + 1]


def run_all(pipeline: Pipeline, progress: Progress = silent) -> None:
    for name in pipeline.stages:
        pipeline.run(name, progress=progress)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("source"), **SHAPE)


@pytest.fixture(scope="module")
def finished() -> dict[str, Pipeline]:
    """Undisturbed runs by kind, made when they are first asked for."""
    return {}


@pytest.fixture
def kind() -> str:
    """How the model is converted, unless a test says otherwise."""
    return "errors"


@pytest.fixture
def undisturbed(
    kind: str, source: Path, finished: dict[str, Pipeline], tmp_path_factory: pytest.TempPathFactory
) -> Pipeline:
    if kind not in finished:
        folder = tmp_path_factory.mktemp("walk")
        config = ConversionConfig(
            source=source,
            out=folder / "out",
            work_root=folder / "work",
            bpw=5,
            calibration={"rows": 3, "row_tokens": 32, "measure_rows": 2, "measure_row_tokens": 32},
            **KINDS[kind],
        )
        pipeline = Pipeline(config, UP_TO_QUANTIZE, device="cpu")
        run_all(pipeline)
        finished[kind] = pipeline
    return finished[kind]


@pytest.fixture(params=LONG)
def stage(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pipeline(undisturbed: Pipeline, stage: str, tmp_path: Path) -> Pipeline:
    """A pipeline that is about to run `stage`."""
    return before(undisturbed, stage, tmp_path)


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sublayers that have been read, in order."""
    indices: list[int] = []
    read = SourceModel.sublayer

    def recording(model: SourceModel, sublayer):
        indices.append(sublayer.index)
        return read(model, sublayer)

    monkeypatch.setattr(SourceModel, "sublayer", recording)
    return indices


@pytest.fixture
def states_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "STATES_INTERVAL_SECONDS", 0.0)


def crashed(pipeline: Pipeline, stage: str, walked: list[int]) -> None:
    """Run into a crash after some sublayers and forget what was read."""
    with pytest.raises(Crash):
        run_all(pipeline, after(stage, STOP_AFTER, crash))
    walked.clear()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, STOP_AFTER - 1])  # the crash came before its states
def test_a_resume_goes_on_from_the_last_saved_states_or_the_start(
    undisturbed: Pipeline,
    pipeline: Pipeline,
    stage: str,
    walked: list[int],
    first: int,
    request: pytest.FixtureRequest,
) -> None:
    if first:
        request.getfixturevalue("states_every_time")
    crashed(pipeline, stage, walked)

    pipeline.run(stage, progress=silent)

    assert walked == ALL[first:]
    assert results(pipeline, stage) == results(undisturbed, stage)


def test_a_signal_saves_the_states_however_recent_the_last_ones(
    undisturbed: Pipeline, pipeline: Pipeline, stage: str, walked: list[int]
) -> None:
    with pytest.raises(Interrupted, match=f"stage `{stage}` after {STOP_AFTER} of"):
        run_all(pipeline, after(stage, STOP_AFTER, interrupt))
    walked.clear()

    pipeline.run(stage, progress=silent)

    assert walked == ALL[STOP_AFTER:]
    assert results(pipeline, stage) == results(undisturbed, stage)


@pytest.mark.usefixtures("states_every_time")
@pytest.mark.parametrize(("stage", "damage"), DAMAGES[:2])
def test_damaged_states_are_not_used(
    undisturbed: Pipeline,
    pipeline: Pipeline,
    stage: str,
    walked: list[int],
    damage: Callable[[Path], None],
) -> None:
    crashed(pipeline, stage, walked)
    for path in pipeline.path(stage).glob("states-?.safetensors"):
        damage(path)

    pipeline.run(stage, progress=silent)

    assert walked == ALL
    assert results(pipeline, stage) == results(undisturbed, stage)


@pytest.mark.usefixtures("states_every_time")
@pytest.mark.parametrize(("stage", "damage"), DAMAGES)
def test_a_damaged_sublayer_is_made_again_and_the_others_stay(
    undisturbed: Pipeline,
    pipeline: Pipeline,
    stage: str,
    walked: list[int],
    damage: Callable[[Path], None],
) -> None:
    crashed(pipeline, stage, walked)
    folder = pipeline.path(stage) / "sublayers"
    damaged = sorted(folder.iterdir())[1]
    damage(damaged)
    intact = identities(folder)
    intact.pop(damaged.name, None)

    pipeline.run(stage, progress=silent)

    assert walked == ALL  # the saved states lie behind the damage
    assert intact.items() <= identities(folder).items()
    assert results(pipeline, stage) == results(undisturbed, stage)


@pytest.mark.usefixtures("states_every_time")
@pytest.mark.parametrize(("stage", "damage"), DAMAGES[::2])
def test_a_stage_whose_manifest_is_damaged_begins_anew(
    undisturbed: Pipeline,
    pipeline: Pipeline,
    stage: str,
    walked: list[int],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    crashed(pipeline, stage, walked)
    before = len(list((pipeline.path(stage) / "sublayers").iterdir()))
    damage(pipeline.path(stage) / "manifest.json")

    pipeline.run(stage, progress=silent)

    assert f"stage `{stage}` begins anew: its manifest is damaged" in caplog.text
    (kept,) = pipeline.path(stage).parent.glob("*.damaged-*")
    assert len(list((kept / "sublayers").iterdir())) == before
    assert walked == ALL
    assert results(pipeline, stage) == results(undisturbed, stage)


@pytest.mark.usefixtures("states_every_time")
def test_a_stage_begun_on_another_device_is_refused_and_kept(
    undisturbed: Pipeline, pipeline: Pipeline, stage: str, walked: list[int]
) -> None:
    crashed(pipeline, stage, walked)
    folder = StageFolder.load(pipeline.path(stage), pipeline.refs[stage].fingerprint)
    assert folder is not None
    folder.manifest.device = "cuda"
    folder.save()
    before = identities(pipeline.path(stage))

    with pytest.raises(StoreError, match=rf"`{stage}` was begun on cuda .* make the GPU visible"):
        pipeline.run(stage, progress=silent)

    assert identities(pipeline.path(stage)) == before
    folder.manifest.device = "cpu"
    folder.save()
    pipeline.run(stage, progress=silent)
    assert results(pipeline, stage) == results(undisturbed, stage)


def test_result_of_other_options_is_not_reused(undisturbed: Pipeline, tmp_path: Path) -> None:
    config = undisturbed.config.model_copy(update={"head_bits": 4, "work_root": tmp_path})
    other = Pipeline(config, UP_TO_QUANTIZE, device="cpu")

    shutil.copytree(undisturbed.path("quantize"), other.path("quantize"))

    assert not other.is_complete("quantize")


def test_only_what_leads_to_a_missing_result_is_replayed(
    undisturbed: Pipeline, pipeline: Pipeline, stage: str, walked: list[int]
) -> None:
    shutil.copytree(undisturbed.path(stage), pipeline.path(stage))
    delete(sorted((pipeline.path(stage) / "sublayers").iterdir())[2])

    pipeline.run(stage, progress=silent)

    assert walked == [0, 1, 2]
    assert results(pipeline, stage) == results(undisturbed, stage)


@pytest.mark.parametrize("kind", ["nats"])
@pytest.mark.parametrize("stage", ["sensitivity", *LONG])
def test_a_run_whose_memory_ends_goes_on_by_itself(
    stage: str, undisturbed: Pipeline, pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [torch.OutOfMemoryError()]

    def end_once() -> None:
        if errors:
            raise errors.pop()

    pipeline.run(stage, progress=after(stage, STOP_AFTER, end_once))

    assert not errors
    assert "remedy=out of memory" in caplog.text
    assert results(pipeline, stage) == results(undisturbed, stage)


def test_work_that_lacks_memory_is_done_once_more_with_states_elsewhere(
    undisturbed: Pipeline,
) -> None:
    kept: list[bool] = []

    def work(model: SourceModel, failures: int) -> str:
        kept.append(model.keeps_states)
        if len(kept) <= failures:
            raise torch.OutOfMemoryError
        return "done"

    model = SourceModel.open(undisturbed.config, "cpu")
    assert remedied(model, partial(work, failures=1)) == "done"
    assert kept == [True, False]

    kept.clear()
    with pytest.raises(torch.OutOfMemoryError):
        remedied(model, partial(work, failures=2))
    assert kept == [True, False]
