"""Options whose default depends on what the device holds."""

from pathlib import Path

import pytest
import torch
from conversions import small_config
from stage_runs import run_until, text_parquet
from tiny import make_tiny

from exl2flow.core.options.config import ConversionConfig, TuneOptions
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.files import read_tensors
from exl2flow.core.store.stage import COMPOSED, ROWS_FILE, Pipeline
from exl2flow.model import resolve
from exl2flow.pipeline import by_device
from exl2flow.pipeline.by_device import TRAINING_ROWS, settled, with_codes, with_rows, with_text
from exl2flow.pipeline.local import RUNS
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.tokenize.stage import further_rows, judging_texts
from exl2flow.quant.tune.stage import tune_memory
from exl2flow.quant.walk.needs import Card

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


def test_what_memory_suffices_for_is_trained(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def trained(**values: object) -> tuple[int, float, int | None, int | None]:
        config = config_in(source, tmp_path, tune={"steps": 1, **values})
        tune = with_codes(config).tune
        return tune.steps, tune.code_rate, tune.rows, tune.tokens

    plain, codes = (
        tune_memory(resolve(source), TuneOptions(code_rate=rate), 64) for rate in (0, 0.15)
    )
    assert trained() == (1, 0.15, None, None)
    between = (plain + codes) / 2 / by_device.ROOM
    monkeypatch.setattr(by_device, "total_memory", lambda device: between)
    assert trained() == (1, 0, 0, 2048)
    assert trained(tokens=64) == (1, 0, 0, 64)
    assert not caplog.messages
    monkeypatch.setattr(by_device, "total_memory", lambda device: plain)
    assert trained() == (0, 0.15, None, None)
    assert f"no training end to end, which needs {plain / 1e9:.1f} GB of the device" in caplog.text


def test_as_many_layers_as_fit_are_trained_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny("llama", tmp_path / "tiny", num_hidden_layers=7)

    def layers(memory: float, **values: object) -> int | None:
        monkeypatch.setattr(by_device, "total_memory", lambda device: memory / by_device.ROOM + 1)
        config = config_in(source, tmp_path, tune={"steps": 1, **values})
        return with_codes(config).tune.layers

    def needed(together: int | None) -> int:
        return tune_memory(resolve(source), TuneOptions(layers=together), 64)

    assert layers(needed(None)) is None
    assert [layers(needed(n)) for n in (4, 3, 2)] == [4, 3, 2]
    assert layers(needed(4) - 2) == 3  # 6 and 5 make as many windows as 4 does
    assert layers(needed(2) - 2) is None
    assert layers(needed(1), layers=1) == 1


def test_rows_to_train_on_are_written_on_a_gpu_that_holds_the_model(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(**values: object) -> int | None:
        return with_rows(config_in(source, tmp_path, "mine.parquet", tune=values)).tune.rows

    assert rows(steps=1) == 0  # a CPU
    assert rows(steps=1, rows=7) == 7
    assert rows(steps=0) is None
    monkeypatch.setattr(by_device, "resolve_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(by_device.Card, "of", lambda device, limit: Card(name="a", memory=1 << 34))
    assert rows(steps=1) == TRAINING_ROWS
    monkeypatch.setattr(by_device.Card, "of", lambda device, limit: Card(name="a", memory=1000))
    assert rows(steps=1) == 0


def test_a_user_s_text_is_mixed_with_rows_that_the_model_writes(
    source: Path, tmp_path: Path
) -> None:
    text = text_parquet(tmp_path / "text.parquet")
    tune = {"steps": 1, "rows": 6, "tokens": 64, "interval": 1, "held_out_rows": 1}
    config = settled(CONVERT, config_in(source, tmp_path, str(text), tune=tune))

    pipeline = run_until(config, "tokenize")

    assert config.writes
    written = read_tensors(pipeline.path("compose") / ROWS_FILE)[COMPOSED]
    assert len(written) == 6
    judging = judging_texts(pipeline.path("tokenize"), 1)
    assert list(judging) == ["calibration", "held-out", "self-written"]
    assert torch.equal(judging["self-written"][:, 1:], written[:3, 1:64])
    assert torch.equal(further_rows(pipeline.path("compose"), config), written[:, :64])
