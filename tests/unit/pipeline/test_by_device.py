"""Options whose default depends on what the device holds."""

from pathlib import Path

import pytest
from conversions import small_config
from tiny import make_tiny

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.stage import Pipeline
from exl2flow.pipeline import by_device
from exl2flow.pipeline.by_device import with_codes, with_text
from exl2flow.pipeline.local import RUNS
from exl2flow.pipeline.stages import STAGES

CONVERT = RUNS["convert"]
ROWS = {"rows": 2, "row_tokens": 64, "measure_rows": 1, "measure_row_tokens": 64}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("text") / "tiny", num_hidden_layers=1)


def config_in(source: Path, folder: Path, text: str = "auto", **values: object) -> ConversionConfig:
    calibration = {**ROWS, "text": text}
    return small_config(source, folder / "out", calibration=calibration, **values)


def text_of(config: ConversionConfig) -> str:
    return with_text(CONVERT, config).calibration.text


@pytest.mark.parametrize("text", ["standard", "chat", "self", "mine.parquet"])
def test_a_text_that_is_named_stays(source: Path, tmp_path: Path, text: str) -> None:
    assert text_of(config_in(source, tmp_path, text)) == text


def test_the_default_is_what_the_model_writes_but_not_for_the_preset_of_exllamav2() -> None:
    given = {"source": "a", "out": "b"}
    texts = {
        quality: ConversionConfig.model_validate({**given, "quality": quality}).calibration.text
        for quality in ("fast", "standard", "best", "exllamav2")
    }

    assert texts == {"fast": "auto", "standard": "auto", "best": "auto", "exllamav2": "standard"}


def test_a_model_that_fits_writes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(source, tmp_path, tune={"steps": 1})
    assert text_of(config) == "self"
    assert text_of(config_in(source, tmp_path)) == "standard"  # slow, on a CPU

    with monkeypatch.context() as patch:
        patch.setattr(by_device, "CPU_OPERATIONS", 10.0)
        assert text_of(config) == "standard"
    with monkeypatch.context() as patch:
        patch.setattr(by_device, "available_memory", lambda: 1_000_000)
        assert text_of(config) == "standard"


def test_what_was_begun_goes_on_with_its_text(source: Path, tmp_path: Path) -> None:
    def config(text: str = "auto") -> ConversionConfig:
        return config_in(source, tmp_path, text, tune={"steps": 1})

    begun = Pipeline(config("standard"), STAGES, device="cpu")
    begun.run("tokenize", progress=silent)
    assert text_of(config()) == "self"  # nothing was stopped

    begun.path("sensitivity").mkdir(parents=True)
    assert text_of(config()) == "standard"

    own = Pipeline(config("self"), STAGES, device="cpu")
    own.path("compose").mkdir(parents=True)
    assert text_of(config()) == "self"


def test_a_source_that_cannot_be_read_is_left_to_the_checks(tmp_path: Path) -> None:
    assert text_of(config_in(tmp_path / "nowhere", tmp_path)) == "standard"


def test_codes_are_trained_where_memory_suffices(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(**values: object) -> tuple[float, int, int | None]:
        config = config_in(source, tmp_path, tune={"steps": 1, **values})
        tune = with_codes(config).tune
        return tune.code_rate, tune.rows, tune.tokens

    assert trained() == (0.15, 488, None)
    monkeypatch.setattr(by_device, "total_memory", lambda device: 1e9)  # of which a pass takes all
    assert trained() == (0, 0, 2048)
    assert trained(tokens=64) == (0, 0, 64)
    assert trained(steps=0) == (0.15, 488, None)  # nothing is trained at all
