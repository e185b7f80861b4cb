"""Training a few layers at a time: closer to the source, never farther, the same after a stop."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from stage_runs import foreign_measurement, text_parquet
from tiny import make_tiny
from traces import contents, truncate

from exl2flow.core.options.config import ConversionConfig, TuneOptions
from exl2flow.core.runtime.progress import Tick, silent
from exl2flow.core.store import store
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import Pipeline
from exl2flow.model import resolve
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.quantize.matrix_work import HEAD_FILE, result_files
from exl2flow.quant.tune.stage import TUNE as TUNE_STAGE
from exl2flow.quant.tune.stage import tune_memory
from exl2flow.quant.tune.windows import window_bytes, windows
from exl2flow.quant.tune.written import TUNING_FILE
from exl2flow.quant.walk.needs import FLOAT, Card, ModelSizes

LAYERS = 2
TUNE = {"layers": 1, "steps": 4, "tokens": 256, "rows": 0}
UP_TO_TUNE = [stage for stage in STAGES if stage.name not in ("compile", "validate")]


class Crash(Exception):
    """Ends the stage as a kill would."""


@pytest.fixture(scope="module", params=["qwen3", "mixtral"])
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A model, quantized and not yet tuned."""
    root = tmp_path_factory.mktemp("windows")
    source = make_tiny(request.param, root / "model", num_hidden_layers=LAYERS)
    config = ConversionConfig(
        source=source,
        out=root / "out",
        quality="exllamav2",  # rounded as coarsely as can be: training has more to gain
        bpw=3.75,
        head_bits=3,
        device="cpu",
        measurement=foreign_measurement(root / "measurement.json", resolve(source)),
        calibration={
            "text": text_parquet(root / "text.parquet"),
            "rows": 10,
            "row_tokens": 64,
            "measure_rows": 1,
            "measure_row_tokens": 64,
        },
        tune=TUNE,
    )
    pipeline = Pipeline(config, UP_TO_TUNE, device="cpu")
    for name in pipeline.stages:
        if name != "tune":
            pipeline.run(name, progress=silent)
    return pipeline


@pytest.fixture(scope="module")
def tuned(quantized: Pipeline) -> Pipeline:
    """The same, tuned without disturbance."""
    quantized.run("tune", progress=silent)
    return quantized


@pytest.fixture
def untuned(quantized: Pipeline, tmp_path: Path) -> Callable[..., Pipeline]:
    """Makes pipelines that are about to tune, with other options if wanted."""

    def make(**options: object) -> Pipeline:
        tune = quantized.config.tune.model_copy(update=options)
        changes = {"work_root": tmp_path, "tune": tune}
        config = quantized.config.model_copy(update=changes)
        pipeline = Pipeline(config, UP_TO_TUNE, device="cpu")
        for name in pipeline.stages:
            if name != "tune":
                shutil.copytree(quantized.path(name), pipeline.path(name))
        return pipeline

    return make


def results(pipeline: Pipeline, stage: str = "tune") -> dict[str, str]:
    found = contents(pipeline.path(stage))
    return {
        name: digest
        for name, digest in found.items()
        if not name.startswith(("manifest", "states"))
    }


def test_windows_are_whole_layers(tmp_path: Path) -> None:
    spec = resolve(make_tiny("qwen3", tmp_path, num_hidden_layers=3))

    parts = windows(spec, 2)

    assert [s for part in parts for s in part] == [*spec.sublayers]
    assert [sorted({s.layer_index for s in part}) for part in parts] == [[0, 1], [2]]
    sizes = [tune_memory(spec, TuneOptions(layers=n), 64) for n in (1, 2, 3)]
    assert sizes == sorted(set(sizes))
    assert sizes[1] == window_bytes(spec, parts[0], 64)


def test_states_wait_in_main_memory_beside_a_gpu(quantized: Pipeline) -> None:
    config, spec = quantized.config, resolve(quantized.config.source)
    assert TUNE_STAGE.needs is not None

    card = Card(name="small", memory=1 << 31)
    alone, beside = (
        TUNE_STAGE.needs(config, ModelSizes(spec, where, packed=1, factors=0))
        for where in (None, card)
    )

    states = FLOAT * spec.hidden_size * config.calibration.row_tokens * config.calibration.rows
    assert alone.pinned_bytes == alone.gpu_memory_bytes == 0
    assert alone.memory_bytes > beside.pinned_bytes > 2 * states
    assert tune_memory(spec, config.tune, 64, 1 << 31) < beside.gpu_memory_bytes < 1 << 31


def test_the_model_comes_closer_to_its_source(tuned: Pipeline) -> None:
    report = read_json(tuned.path("tune") / TUNING_FILE)
    names = result_files(resolve(tuned.config.source))

    assert report["best_kl"] < report["first_kl"]
    assert report["judgements"][1] == [TUNE["steps"], report["best_kl"]]
    assert {*names, TUNING_FILE} == set(results(tuned))
    before, after = results(tuned, "quantize"), results(tuned)
    changed = {name for name in names if before[name] != after[name]}
    trained = {name for name in names if "experts" not in name and name != HEAD_FILE}
    assert changed == trained


def test_training_that_does_not_help_leaves_all_as_it_was(untuned: Callable[..., Pipeline]) -> None:
    pipeline = untuned(code_rate=1e4, scale_rate=10.0)

    pipeline.run("tune", progress=silent)

    assert read_json(pipeline.path("tune") / TUNING_FILE)["best_step"] == 0
    names = result_files(resolve(pipeline.config.source))
    found, before = results(pipeline), results(pipeline, "quantize")
    assert {n: found[n] for n in names} == {n: before[n] for n in names}


@pytest.mark.parametrize("interval", [0.0, 1e9], ids=["states", "no-states"])
def test_a_resumed_run_gives_the_same_bytes(
    tuned: Pipeline,
    untuned: Callable[..., Pipeline],
    monkeypatch: pytest.MonkeyPatch,
    interval: float,
) -> None:
    monkeypatch.setattr(store, "STATES_INTERVAL_SECONDS", interval)
    pipeline = untuned()

    def crash(tick: Tick) -> None:
        if (tick.stage, tick.done) == ("tune", 2):
            raise Crash

    with pytest.raises(Crash):
        pipeline.run("tune", progress=crash)
    pipeline.run("tune", progress=silent)

    assert results(pipeline) == results(tuned)


def test_a_damaged_file_is_made_again(tuned: Pipeline, untuned: Callable[..., Pipeline]) -> None:
    pipeline = untuned()
    shutil.copytree(tuned.path("tune"), pipeline.path("tune"))
    truncate(pipeline.path("tune") / result_files(resolve(tuned.config.source))[0])

    pipeline.run("tune", progress=silent)

    assert results(pipeline) == results(tuned)
