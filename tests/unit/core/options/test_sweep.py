"""Bitrates of a sweep, locks of stages that run side by side."""

import math
from contextlib import nullcontext
from pathlib import Path

import pytest
from pydantic import ValidationError

from exl2flow.core.errors import Interrupted, WorkDirBusy
from exl2flow.core.options.sweep import REPORT_PAGE, SWEEP_FILE, SweepConfig
from exl2flow.core.store.store import WorkDir


def sweep_of(**values: object) -> SweepConfig:
    return SweepConfig.model_validate({"source": "model", "out": "out", **values})


def test_bitrates_are_distinct_and_rise() -> None:
    assert sweep_of(bpw=[4, 2.5, 4.0]).bpw == (2.5, 4.0)


def test_bitrates_may_be_any_sequence() -> None:
    assert sweep_of(bpw=(4, 3)).bpw == (3.0, 4.0)
    with pytest.raises(ValidationError, match="bpw"):
        sweep_of(bpw={4: 3})


def test_a_sweep_is_named_by_its_model_and_bitrates() -> None:
    assert sweep_of(bpw=(4, 2.5)).run_name == "model@2.5,4bpw"
    assert (SWEEP_FILE, REPORT_PAGE) == ("sweep.json", "report.html")  # others read them


@pytest.mark.parametrize(
    ("runner", "is_allowed"),
    [("dask", True), ("ray", True), ("threads", False), ("processes", False)],
)
def test_a_cluster_has_a_runner_that_knows_one(runner: str, is_allowed: bool) -> None:
    with nullcontext() if is_allowed else pytest.raises(ValidationError, match="`dask` or `ray`"):
        sweep_of(bpw=[4], runner=runner, cluster="there:8786")


def test_bitrates_that_differ_have_folders_that_differ() -> None:
    bitrates = (3.12, 3.125, 4.0, 4.001, math.nextafter(4.001, 5))

    assert len(sweep_of(bpw=bitrates).models()) == len(bitrates)


@pytest.mark.parametrize("bpw", [[], [1.5], [9], "3,4", None])
def test_bitrates_out_of_range_are_refused(bpw: object) -> None:
    with pytest.raises(ValidationError):
        sweep_of(bpw=bpw)


def test_conversions_differ_in_bits_and_folder_only() -> None:
    config = sweep_of(bpw=[3, 4], quality="fast", calibration={"rows": 7})

    low, high = config.models().values()

    assert (low.bpw, low.out.name, high.out.name) == (3, "3.0bpw", "4.0bpw")
    assert low.work_dir_root == config.work_dir_root == high.work_dir_root
    assert low.calibration == config.calibration
    assert low.model_copy(update={"bpw": 4.0, "out": high.out}) == high


def test_conversions_of_a_sweep_publish_nothing_themselves() -> None:
    publish = {"repo": "me/model-exl2"}
    config = sweep_of(bpw=[3, 4], publish=publish)

    assert config.publish is not None
    assert config.models() == sweep_of(bpw=[3, 4]).models()


def test_configuration_survives_json() -> None:
    publish = {"repo": "me/model-exl2", "token_block": "block"}
    config = sweep_of(bpw=[3, 4], quality="best", runner="dask", workers=2, publish=publish)

    assert SweepConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("where", [{"gpu_split": "20,24"}, {"reserve": "0"}, {"devices": "1"}])
def test_processes_with_one_gpu_each_split_no_model(where: dict[str, str]) -> None:
    assert sweep_of(bpw=[3, 4], **where).conversion(4.0).is_split
    with pytest.raises(ValidationError, match="the runner `processes` gives each process one GPU"):
        sweep_of(bpw=[3], runner="processes", **where)


def test_cluster_without_a_runner_that_has_any_is_refused() -> None:
    with pytest.raises(ValidationError, match="needs the runner `dask` or `ray`"):
        sweep_of(bpw=[3], runner="processes", cluster="tcp://127.0.0.1:8786")


def test_stages_run_side_by_side_but_neither_twice_nor_into_one_output(tmp_path: Path) -> None:
    work = WorkDir(tmp_path / "work")
    a, b = (work.ref("quantize", letter * 64) for letter in "ab")

    with work.lock_stage(a, tmp_path / "3"), work.lock_stage(b, tmp_path / "4"):
        for ref, out in ((a, "5"), (work.ref("quantize", "c" * 64), "4")):
            with pytest.raises(WorkDirBusy, match="is working in"):
                work.lock_stage(ref, tmp_path / out).__enter__()
        with pytest.raises(WorkDirBusy, match="is working in"):
            work.lock().__enter__()

    with work.lock(), pytest.raises(WorkDirBusy):
        work.lock_stage(a, tmp_path / "3").__enter__()


def test_interruption_passes_between_processes() -> None:
    import pickle

    found = pickle.loads(pickle.dumps(Interrupted("stopped", signum=15)))

    assert (str(found), found.signum) == ("stopped", 15)


@pytest.mark.parametrize("more", [{"runner": "ray"}, {"runner": "dask", "cluster": "host:1"}])
def test_a_gpu_of_this_host_is_refused_where_others_choose(more: dict[str, str]) -> None:
    config = {"source": "model", "out": "out", "bpw": (4.0,), "device": "cuda:1"}

    assert SweepConfig(**config, runner="processes").conversion(4.0).device == "cuda:1"
    with pytest.raises(ValidationError, match="Ray and clusters choose GPUs themselves"):
        SweepConfig(**config, **more)
