"""On a GPU, where results are stored by a thread, a run that ends anywhere is gone on with."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from conversions import small_config
from tiny import make_tiny
from traces import contents

from exl2flow.core.config import ConversionConfig
from exl2flow.core.errors import Interrupted
from exl2flow.core.progress import Progress, Tick, silent
from exl2flow.flows.conversion import open_pipeline
from exl2flow.tasks.stages import STAGES

pytestmark = pytest.mark.gpu

UP_TO_COMPILE = [stage for stage in STAGES if stage.name != "validate"]


class Crash(Exception):
    """Ends a stage as a kill would."""


def crash() -> None:
    raise Crash


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def after(stage: str, done: int, act: Callable[[], None]) -> Progress:
    """Return a sink that acts once, when a stage has committed so many results."""
    acted = False

    def sink(tick: Tick) -> None:
        nonlocal acted
        if (tick.stage, tick.done) == (stage, done) and tick.detail and not acted:
            acted = True
            act()

    return sink


def convert(config: ConversionConfig, progress: Progress = silent) -> dict[str, str]:
    """Run all stages but validation, and return the digests of the output."""
    pipeline = open_pipeline(config, UP_TO_COMPILE)
    for name in pipeline.stages:
        pipeline.run(name, progress=progress)
    return {k: v for k, v in contents(config.out).items() if k.endswith(".safetensors")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("source"), num_hidden_layers=6)


def config_in(folder: Path, source: Path) -> ConversionConfig:
    return small_config(source, folder / "out", device="cuda", bpw=4.0, quality="standard")


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return convert(config_in(tmp_path_factory.mktemp("undisturbed"), source))


def test_the_same_bytes_in_every_run(
    source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    assert convert(config_in(tmp_path, source)) == undisturbed


@pytest.mark.parametrize("act", [crash, interrupt], ids=["crash", "signal"])
@pytest.mark.parametrize("stage", ["sensitivity", "measure", "quantize"])
def test_a_run_that_ended_is_gone_on_with(
    stage: str,
    act: Callable[[], None],
    source: Path,
    undisturbed: dict[str, str],
    tmp_path: Path,
) -> None:
    config = config_in(tmp_path, source)
    with pytest.raises((Crash, Interrupted)):
        convert(config, after(stage, 5, act))

    assert convert(config) == undisturbed
