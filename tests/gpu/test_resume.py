"""On a GPU, where a thread stores results, a run interrupted anywhere can be resumed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conversions import small_config
from resumed import Crash, crash, interrupt
from tiny import make_tiny
from traces import contents

from exl2flow.core.errors import Interrupted
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import Progress, Tick, silent
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import SCORE_FILE
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.stages import STAGES

pytestmark = pytest.mark.gpu

UP_TO_COMPILE = [stage for stage in STAGES if stage.name != "validate"]


def after(stage: str, done: int, act: Callable[[], None]) -> Progress:
    """Return a sink that acts once, when a stage has committed `done` results."""
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
    rounding = {"block_steps": 4}
    return small_config(
        source, folder / "out", device="cuda", bpw=4.0, quality="standard", rounding=rounding
    )


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return convert(config_in(tmp_path_factory.mktemp("undisturbed"), source))


def test_the_same_bytes_in_every_run(
    source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    assert convert(config_in(tmp_path, source)) == undisturbed


@pytest.mark.parametrize("first", [0, 1])
def test_a_run_that_ended_in_each_stage_is_gone_on_with(
    first: int, source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    config = config_in(tmp_path, source)
    for index, stage in enumerate(("sensitivity", "measure", "quantize")):
        act = (crash, interrupt)[(first + index) % 2]
        with pytest.raises((Crash, Interrupted)):
            convert(config, after(stage, 5, act))

    assert convert(config) == undisturbed


def wide_config(folder: Path, source: Path) -> ConversionConfig:
    """Return a conversion with 16 rows of 512 tokens, in addition to the source's own."""
    return small_config(
        source,
        folder / "out",
        device="cuda",
        bpw=4.0,
        quality="standard",
        calibration={"rows": 16, "row_tokens": 512, "measure_rows": 5, "measure_row_tokens": 512},
        validate_options={
            "rows": 5,
            "row_tokens": 512,
            "sample_tokens": 4,
            "fail_perplexity_ratio": 1e9,
        },
    )


def convert_and_score(
    config: ConversionConfig, progress: Progress = silent
) -> tuple[dict[str, str], dict[str, object]]:
    """Run all stages; return the digests of the output and the validation result."""
    pipeline = open_pipeline(config, STAGES)
    for name in pipeline.stages:
        pipeline.run(name, progress=progress)
    files = {k: v for k, v in contents(config.out).items() if k.endswith(".safetensors")}
    found = read_json(config.out / SCORE_FILE)
    return files, {name: found[name] for name in ("score", "calibration")}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose products are large enough for cuBLAS to choose its kernels by the rows."""
    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
    return make_tiny(
        "llama",
        tmp_path_factory.mktemp("wide"),
        dtype=torch.float16,
        num_key_value_heads=4,
        max_position_embeddings=512,
        **shape,
    )


def test_a_wide_model_gives_the_same_bytes_and_scores_when_resumed(
    wide: Path, tmp_path: Path
) -> None:
    """The states of a short run are not saved: all finished sublayers are replayed."""
    undisturbed = convert_and_score(wide_config(tmp_path / "undisturbed", wide))
    config = wide_config(tmp_path / "disturbed", wide)
    for stage in ("measure", "quantize"):
        with pytest.raises(Crash):
            convert_and_score(config, after(stage, 3, crash))

    assert convert_and_score(config) == undisturbed
