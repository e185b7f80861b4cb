"""Which devices the processes of a sweep may take."""

import pytest
import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.slots import visible_gpus
from exl2flow.core.sweep import SweepConfig
from exl2flow.flows.bitrates import workers_of


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
