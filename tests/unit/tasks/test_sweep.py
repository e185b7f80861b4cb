"""Which devices the processes of a sweep may take."""

import os
import signal
from pathlib import Path

import pytest
import torch

from exl2flow.core.errors import ConfigError, Interrupted
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.runtime.device_locks import visible_gpus
from exl2flow.core.runtime.interrupt import StopRequest
from exl2flow.flows.runs.runners import Messenger
from exl2flow.pipeline.bitrates import workers_of
from exl2flow.tasks.sweep import ProcessShare, make_bitrate


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("variable", "names"),
    [(None, ["0", "1", "2", "3"]), ("2", ["2"]), ("3, 1", ["3", "1"]), ("", [])],
)
def test_gpus_are_those_that_the_process_sees(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch, variable: str | None, names: list[str]
) -> None:
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)

    assert visible_gpus("auto") == visible_gpus("cuda") == names
    assert visible_gpus("cpu") == []


def test_without_gpus_the_variable_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    assert visible_gpus("auto") == []


def sweep_of(**values: object) -> SweepConfig:
    return SweepConfig.model_validate({"source": "model", "out": "out", "bpw": [3], **values})


def test_there_is_a_worker_per_gpu_unless_fewer_are_given(four_gpus: None) -> None:
    assert workers_of(sweep_of(runner="processes")) == 4
    assert workers_of(sweep_of(runner="dask", workers=3)) == 3
    assert workers_of(sweep_of(runner="threads")) == 1
    assert workers_of(sweep_of(runner="processes", device="cpu", workers=6)) == 6
    with pytest.raises(ConfigError, match="5 workers need as many GPUs, there are 4"):
        workers_of(sweep_of(runner="processes", workers=5))


@pytest.mark.parametrize(("text", "number"), [("2", 2), ("", signal.SIGTERM), ("1x", 15)])
def test_bitrate_does_not_begin_once_the_stop_file_is_there_whatever_it_holds(
    text: str, number: int, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    stop.write_text(text)
    conversion = sweep_of(device="cpu").conversion(3)

    state = make_bitrate.fn("3.0bpw", conversion, ProcessShare(workers=1, stop=stop))

    assert isinstance(state.data, Interrupted)
    assert state.data.signum == number


def test_stop_file_appears_with_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = tmp_path / "stop", []
    flush = os.fsync

    def looking(handle: int) -> None:
        seen.append(file.exists() and file.read_text())
        flush(handle)

    monkeypatch.setattr(os, "fsync", looking)

    stop = StopRequest()
    stop.signum = 2
    Messenger(sweep_of(), stop, file).pass_on()

    assert seen == [False, "2"]  # before and after the rename
