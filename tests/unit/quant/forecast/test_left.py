"""On a resume, disk and memory have to suffice only for the stages that are not finished."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conversions import small_config, snapshot
from stage_runs import calibrated_on, run_until, text_parquet
from tiny import make_tiny

from exl2flow.core.errors import Interrupted, PreflightFailed, StoreError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import Tick
from exl2flow.core.store import store
from exl2flow.core.store.need import Need
from exl2flow.core.store.stage import Pipeline
from exl2flow.pipeline.local import run_locally
from exl2flow.pipeline.stages import MEASURE_STAGES, STAGES
from exl2flow.quant.forecast import preflight as preflight_module
from exl2flow.quant.forecast.plan import Plan
from exl2flow.quant.forecast.preflight import check_disk, preflight

KILOBYTES = 10**3


@pytest.fixture
def set_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what sets the free bytes that the disk reports."""
    usage = type(shutil.disk_usage("/"))
    return lambda free: monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage(10**12, 0, free)
    )


def config_of(folder: Path, **values: object) -> ConversionConfig:
    source = folder / "model"
    if not source.exists():
        make_tiny("llama", source)
    calibration = calibrated_on(text_parquet(folder / "text.parquet"), (64, 64), (8, 64))
    return small_config(source, folder / "out", calibration=calibration, **values)


def disk_left(plan: Plan) -> int:
    """Return the disk space that a plan still needs: the least that `check_disk` accepts."""
    kept = sum(need.kept_bytes + need.output_bytes for need in plan.left.values())
    passing = [need.passing_bytes for need in plan.left.values()]
    return kept + max(passing, default=0)


@pytest.mark.slow
def test_with_only_validation_left_a_full_disk_does_not_stop_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_free: Callable[[int], None]
) -> None:
    config = config_of(tmp_path)
    run_until(config, "compile")
    set_free(5 * KILOBYTES)
    monkeypatch.setattr(preflight_module, "available_memory", lambda: 0)

    made = run_locally(config)

    assert (made.stages["validate"] / "manifest.json").is_file()
    with pytest.raises(PreflightFailed, match="of disk"):  # a fresh conversion needs it all
        preflight(config.model_copy(update={"work_root": tmp_path / "other"}), STAGES)


def test_after_quantizing_only_the_output_needs_disk(
    tmp_path: Path, set_free: Callable[[int], None]
) -> None:
    config = config_of(tmp_path)
    run_until(config, "quantize")

    plan = preflight(config, STAGES)

    assert plan.finished[-1] == "quantize"
    assert dict(plan.rows())["finished"].endswith("allocate, quantize")
    assert disk_left(plan) == plan.output_bytes < plan.work_bytes
    set_free(plan.output_bytes)
    run_locally(config)
    shutil.rmtree(config.out)
    set_free(plan.output_bytes - 1)
    with pytest.raises(PreflightFailed, match="of disk"):
        preflight(config, STAGES)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A conversion that ended when two sublayers were quantized, and saved its states."""
    root = tmp_path_factory.mktemp("ended")
    pipeline = run_until(config_of(root, work_root=root / "work"), "allocate")

    def stop(tick: Tick) -> None:
        if tick.done == 2:
            raise Interrupted("as if a signal came", signum=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "STATES_INTERVAL_SECONDS", 0.0)
        with pytest.raises(Interrupted):
            pipeline.run("quantize", progress=stop)
    return pipeline


@pytest.fixture
def interrupted(ended: Pipeline, tmp_path: Path) -> Pipeline:
    """The same in a work root of its own."""
    root = shutil.copytree(ended.config.work_dir_root, tmp_path / "work")
    return Pipeline(ended.config.model_copy(update={"work_root": root}), STAGES, device="cpu")


def test_valid_files_of_a_partial_stage_are_subtracted(interrupted: Pipeline) -> None:
    config, folder = interrupted.config, interrupted.path("quantize")
    files = [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".json")]
    size = sum(path.stat().st_size for path in files if path.name != "manifest.json")
    states = [path.stat().st_size for path in files if path.name.startswith("states-")]

    plan = preflight(config, STAGES)

    whole, left = plan.needs["quantize"], plan.left["quantize"]
    total = whole.kept_bytes + whole.passing_bytes
    assert states
    # of the saved states one file holds what a resume begins with
    assert left.kept_bytes + left.passing_bytes in (total - size, total - size + states[0])
    assert left.memory_bytes == whole.memory_bytes
    next(path for path in files if path.parent != folder).write_bytes(b"damaged")
    damaged = preflight(config, STAGES).left["quantize"]
    assert damaged.kept_bytes + damaged.passing_bytes > left.kept_bytes + left.passing_bytes


def test_files_of_another_device_are_not_subtracted(interrupted: Pipeline) -> None:
    config = interrupted.config
    plan = preflight(config, STAGES)
    manifest = interrupted.path("quantize") / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"device": "cpu"', '"device": "cuda"'))

    elsewhere = preflight(config, STAGES)

    assert elsewhere.left["quantize"] == plan.needs["quantize"] != plan.left["quantize"]


@pytest.mark.slow
def test_valid_files_in_the_output_are_subtracted(tmp_path: Path) -> None:
    config = config_of(tmp_path, shard_size_mb=1)
    pipeline = run_until(config, "compile")
    manifest = pipeline.work.open(
        pipeline.refs["compile"], schema=0, inputs={}, options={}, device="cpu"
    ).manifest
    assert manifest.status == "partial"

    plan = preflight(config, STAGES)
    for path in config.out.glob("*.safetensors"):
        path.unlink()

    assert plan.left["compile"].output_bytes == 0
    left = preflight(config, STAGES).left["compile"]
    assert left.output_bytes > 0.5 * plan.output_bytes


def test_memory_has_to_suffice_for_unfinished_stages_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, sensitivity={"rows": 64})
    whole = preflight(config, STAGES)
    run_until(config, "measure")
    plan = preflight(config, STAGES)
    least = max(need.memory_bytes for need in plan.left.values())
    assert least < max(need.memory_bytes for need in whole.needs.values())
    free = whole.memory_bytes - 1
    monkeypatch.setattr(preflight_module, "available_memory", lambda: free)

    preflight(config, STAGES)

    with pytest.raises(PreflightFailed, match=r"^the stage `measure` may need"):
        preflight(config, STAGES, anew=True)


def test_measuring_needs_no_output(tmp_path: Path) -> None:
    config = config_of(tmp_path)

    plan = preflight(config, STAGES, run=MEASURE_STAGES)

    assert set(plan.left) == {"tokenize", "sensitivity", "measure"}
    assert disk_left(preflight(config, STAGES)) > disk_left(plan)


def test_a_source_that_was_never_digested_is_not_read_for_a_plan(tmp_path: Path) -> None:
    config = config_of(tmp_path, work_root=tmp_path / "work")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run_until(config_of(elsewhere, work_root=tmp_path / "work"), "tokenize")
    before = snapshot(tmp_path)

    plan = preflight(config, STAGES)

    assert snapshot(tmp_path) == before
    assert plan.left == plan.needs
    assert "finished" not in dict(plan.rows())


def test_a_sweep_shares_what_does_not_depend_on_the_target(
    tmp_path: Path, set_free: Callable[[int], None]
) -> None:
    config = config_of(tmp_path)
    needs = {
        "measure": Need(kept_bytes=100, passing_bytes=7),
        "quantize": Need(kept_bytes=10, passing_bytes=1000),
        "compile": Need(output_bytes=20),
    }
    plan = replace(preflight(config, STAGES, anew=True), left=needs)
    plans = [replace(plan, out=str(tmp_path / name)) for name in ("3bpw", "4bpw", "5bpw")]

    set_free(100 + 3 * (10 + 20) + 1000)
    check_disk(plans, STAGES)
    set_free(100 + 3 * (10 + 20) + 1000 - 1)
    with pytest.raises(StoreError, match="of disk"):
        check_disk(plans, STAGES)
