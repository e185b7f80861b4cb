"""Every command and every configuration takes the name of one of several GPUs."""

import pytest
import typer
from pydantic import BaseModel, ValidationError

from exl2flow.cli.main import app
from exl2flow.cli.options import settings_of
from exl2flow.core.options.base import Options
from exl2flow.core.options.comparison import ComparedModels
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.generation import BenchOptions, GenerationOptions
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.options.serving import ServeOptions
from exl2flow.core.options.sweep import SweepConfig

MODELS = [
    ConversionConfig,
    MeasureConfig,
    SweepConfig,
    RefinementConfig,
    ComparedModels,
    PublishConfig,
    GenerationOptions,
    BenchOptions,
    ServeOptions,
]


def with_device() -> set[type[BaseModel]]:
    """Return all models of options that have a device, and no subclass among them."""
    found, left = set[type[BaseModel]](), [Options]
    while left:
        model = left.pop()
        left += model.__subclasses__()
        if "device" in model.model_fields:
            found.add(model)
    return found


def problems_of(model: type[BaseModel], name: str) -> list[str]:
    """Return what a model says of a device; other fields are missing."""
    with pytest.raises(ValidationError) as refused:
        model.model_validate({"device": name, "no_such_field": 1})
    return [item["msg"] for item in refused.value.errors() if item["loc"] == ("device",)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_options_take_each_name_of_a_device_and_nothing_else(model: type[BaseModel]) -> None:
    for name in ("auto", "cpu", "cuda", "cuda:0", "cuda:1", "cuda:15"):
        assert problems_of(model, name) == []
    for name in ("gpu", "cuda:", "cuda:x", "cuda1", "CUDA", "cuda:1\n"):
        (problem,) = problems_of(model, name)
        assert "must be `auto`, `cpu`, `cuda`" in problem


def test_no_model_of_options_has_a_device_of_another_kind() -> None:
    kinds = {str(model.model_fields["device"].annotation) for model in with_device()}

    assert with_device() >= {*MODELS}
    assert kinds == {"<class 'str'>"}


def test_every_command_shows_that_it_takes_one() -> None:
    found = {
        name: parameter.metavar
        for name, command in typer.main.get_command(app).commands.items()
        for parameter in command.params
        if "--device" in parameter.opts
    }

    assert {*found.values()} == {"auto|cpu|cuda"}
    wanted = "convert measure sweep refine validate generate chat serve bench publish"
    assert found.keys() >= {*wanted.split()}
    assert len(settings_of(ConversionConfig)) > 1


@pytest.mark.parametrize("gpus", ["1", "16", "all", "0,1", "3,0,12"])
def test_gpus_are_a_number_all_or_indexes(gpus: str) -> None:
    config = ConversionConfig.model_validate({"source": "a", "out": "b", "bpw": 4.0, "gpus": gpus})

    assert config.gpus == gpus


@pytest.mark.parametrize("gpus", ["0", "two", "0,", ",1", "1 2", "-1", "cuda:1", ""])
def test_other_words_for_gpus_are_refused_with_what_to_give(gpus: str) -> None:
    with pytest.raises(ValidationError, match="how many GPUs, `all`, or which, as 0,2"):
        ConversionConfig.model_validate({"source": "a", "out": "b", "bpw": 4.0, "gpus": gpus})


def test_gpus_and_one_gpu_by_name_contradict_each_other() -> None:
    given = {"source": "a", "out": "b", "bpw": 4.0, "gpus": "2", "device": "cuda:1"}

    with pytest.raises(ValidationError, match="`device` is cuda:1, which is one GPU; name it in"):
        ConversionConfig.model_validate(given)
