"""The stage: the rows it takes, its files, and what is left of it after an interruption."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from backward_runs import configuration, pipeline_in, run_all, whole_decoder
from resumed import Crash, after, before, crash, interrupt, results
from traces import alter, delete, identities, truncate

from exl2flow.core.errors import CalibrationError, Interrupted
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import Tick, silent
from exl2flow.core.store import store
from exl2flow.core.store.files import write_json, write_tensors
from exl2flow.core.store.stage import KINDS_FILE, ROWS_FILE, Pipeline
from exl2flow.model import resolve
from exl2flow.model.layers.rope import rope_table
from exl2flow.quant.sensitivity.stage import (
    SENSITIVITY,
    factor_file,
    factor_files,
    needs,
    spread_rows,
)
from exl2flow.quant.walk.needs import ModelSizes
from exl2flow.quant.walk.source_model import SourceModel

LAYERS = 3
SHAPE = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 64}
COUNT = 2 * LAYERS + 1
DAMAGES = [delete, truncate, alter]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp("sensitivity")
    return run_all(pipeline_in(configuration("llama", folder, block=48, **SHAPE), folder / "work"))


@pytest.fixture
def pipeline(undisturbed: Pipeline, tmp_path: Path) -> Pipeline:
    """A pipeline whose rows are made."""
    return before(undisturbed, "sensitivity", tmp_path)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
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


def test_finished_stage_holds_the_factors_and_nothing_else(undisturbed: Pipeline) -> None:
    spec = resolve(undisturbed.config.source)

    assert set(results(undisturbed, "sensitivity")) == set(factor_files(spec))
    assert len(factor_files(spec)) == COUNT
    assert undisturbed.is_complete("sensitivity")


@pytest.mark.parametrize(
    ("done", "interval"), [(1, 0.0), (4, 0.0), (3, 1000.0), (COUNT - 1, 1000.0)]
)
def test_resumed_run_writes_the_same_bytes(
    done: int,
    interval: float,
    undisturbed: Pipeline,
    pipeline: Pipeline,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "STATES_INTERVAL_SECONDS", interval)
    with pytest.raises(Crash):
        run_all(
            pipeline, after("sensitivity", done, crash, words="lm_head" if done == 1 else "layers")
        )
    finished = identities(pipeline.path("sensitivity") / "factors")

    pipeline.run("sensitivity", progress=silent)

    assert len(finished) == done
    assert finished.items() <= identities(pipeline.path("sensitivity") / "factors").items()
    assert results(pipeline, "sensitivity") == results(undisturbed, "sensitivity")
    assert pipeline.is_complete("sensitivity")


@pytest.mark.parametrize("layer", range(LAYERS))
def test_run_that_ends_on_the_way_forward_is_resumed(
    layer: int, undisturbed: Pipeline, pipeline: Pipeline
) -> None:
    with pytest.raises(Crash):
        run_all(pipeline, after("sensitivity", 0, crash, words=f"forward model.layers.{layer}.mlp"))

    pipeline.run("sensitivity", progress=silent)

    assert results(pipeline, "sensitivity") == results(undisturbed, "sensitivity")


def test_signal_stops_the_run_and_saves_the_gradients(
    undisturbed: Pipeline, pipeline: Pipeline, loaded: list[int]
) -> None:
    with pytest.raises(Interrupted, match=f"stage `sensitivity` after 3 of {COUNT}"):
        run_all(pipeline, after("sensitivity", 3, interrupt))
    loaded.clear()

    pipeline.run("sensitivity", progress=silent)

    assert max(loaded) == COUNT - 1 - 3  # the head and two sublayers are done with
    assert results(pipeline, "sensitivity") == results(undisturbed, "sensitivity")


@pytest.mark.usefixtures("states_every_time")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_states_are_not_used(
    undisturbed: Pipeline, pipeline: Pipeline, damage: Callable[[Path], None]
) -> None:
    with pytest.raises(Crash):
        run_all(pipeline, after("sensitivity", 3, crash))
    folder = pipeline.path("sensitivity")
    for path in (*folder.glob("states-?.safetensors"), *(folder / "inputs").iterdir()):
        damage(path)

    pipeline.run("sensitivity", progress=silent)

    assert results(pipeline, "sensitivity") == results(undisturbed, "sensitivity")


@pytest.mark.parametrize(("place", "damage"), [*zip([0, 2, COUNT - 1], DAMAGES, strict=True)])
def test_only_a_lost_file_is_made_again(
    undisturbed: Pipeline, pipeline: Pipeline, place: int, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(undisturbed.path("sensitivity"), pipeline.path("sensitivity"))
    files = factor_files(resolve(undisturbed.config.source))
    damage(pipeline.path("sensitivity") / files[place])
    folder = pipeline.path("sensitivity") / "factors"
    intact = identities(folder)
    intact.pop(Path(files[place]).name, None)

    pipeline.run("sensitivity", progress=silent)

    assert intact.items() <= identities(folder).items()
    assert results(pipeline, "sensitivity") == results(undisturbed, "sensitivity")


@pytest.mark.usefixtures("states_every_time")
def test_disk_holds_a_few_states_and_sublayers_run_forward_at_most_twice(
    tmp_path: Path, loaded: list[int]
) -> None:
    shape = {**SHAPE, "num_hidden_layers": 8}
    pipeline = pipeline_in(configuration("llama", tmp_path, **shape), tmp_path / "work")
    most = 0

    def sink(_: Tick) -> None:
        nonlocal most
        inputs = pipeline.path("sensitivity") / "inputs"
        most = max(most, len(list(inputs.glob("*")) if inputs.exists() else []))

    run_all(pipeline, sink)

    assert most == 7  # of 16: every fourth, and those of the last segment
    assert max(loaded.count(index) for index in loaded) == 3  # twice forward, once backward


def test_disk_is_foreseen(tmp_path: Path) -> None:
    config = configuration("llama", tmp_path, **SHAPE)
    pipeline = pipeline_in(config, tmp_path / "work")
    most = 0

    def sink(_: Tick) -> None:
        nonlocal most
        files = pipeline.path("sensitivity").rglob("*.safetensors")
        most = max(most, sum(path.stat().st_size for path in files))

    run_all(pipeline, sink)

    spec = resolve(config.source)
    size = sum(path.stat().st_size for path in pipeline.path("sensitivity").rglob("*.safetensors"))
    need = needs(config, ModelSizes(spec, None, packed=0, factors=0))
    assert size < most < need.kept_bytes + need.passing_bytes < 2 * most
    assert need.memory_bytes > 3 * 2 * 64 * 32 * 4


def test_tables_of_positions_made_in_inference_mode_do_no_harm(
    undisturbed: Pipeline, pipeline: Pipeline
) -> None:
    rope_table.cache_clear()
    with torch.inference_mode():
        whole_decoder(undisturbed.config).forward(torch.zeros(1, 64, dtype=torch.int64))

    pipeline.run("sensitivity", progress=silent)

    assert results(pipeline, "sensitivity") == results(undisturbed, "sensitivity")


def rows_folder(folder: Path, kinds: list[str]) -> Path:
    """Write rows that hold nothing but their number; those of noise are negative."""
    ids = torch.arange(len(kinds))[:, None].expand(-1, 4).clone()
    ids[[kind == "noise" for kind in kinds]] = -1
    write_tensors(folder / ROWS_FILE, {"quantize": ids, "measure": ids})
    write_json(folder / KINDS_FILE, {"quantize": {"kinds": kinds}})
    return folder


def test_rows_are_text_and_spread_over_the_mix(tmp_path: Path) -> None:
    kinds = ["web", "random", "web", "code", "noise", "code", "shuffled", "stories"]
    folder = rows_folder(tmp_path, kinds)

    taken = {count: spread_rows(folder, count, 1)[:, 0].tolist() for count in (1, 3, 4, 99)}

    # the row at 5 judges
    assert taken == {1: [0], 3: [0, 2, 6], 4: [0, 2, 3, 6], 99: [0, 2, 3, 6, 7]}


def test_mix_without_text_is_refused(tmp_path: Path) -> None:
    folder = rows_folder(tmp_path, ["random", "noise"])

    with pytest.raises(CalibrationError, match="none of the 2 calibration rows is text"):
        spread_rows(folder, 2)


def test_labels_depend_on_the_seed(undisturbed: Pipeline, pipeline: Pipeline) -> None:
    options = undisturbed.config.sensitivity.model_copy(update={"seed": 1})
    config = undisturbed.config.model_copy(update={"sensitivity": options})
    other = run_all(pipeline_in(config, pipeline.config.work_dir_root))

    found = results(other, "sensitivity")

    changed = {
        name
        for name, digest in results(undisturbed, "sensitivity").items()
        if found[name] != digest
    }
    assert changed == {factor_file(index) for index in range(2 * LAYERS)}  # the head draws none


def test_stage_is_left_out_when_errors_are_measured() -> None:
    stage = SENSITIVITY
    config = ConversionConfig(source=Path("a"), out=Path("b"))
    options = config.sensitivity.model_copy(update={"kind": "error"})

    assert stage.enabled(config)
    assert not stage.enabled(config.model_copy(update={"sensitivity": options}))
