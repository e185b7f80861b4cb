"""Each command checks its configuration once; a flow without a command checks for itself."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conversions import small_config, small_options
from tiny import make_tiny
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.core.errors import ConfigError, PreflightFailed
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.pipeline import devices, preparation
from exl2flow.pipeline.local import RUNS, run_locally
from exl2flow.pipeline.preparation import prepare, reuse_checks
from exl2flow.quant.tokenize.stage import TOKENIZE

SHORT = ("--row-tokens", "64", "--measure-rows", "1", "--measure-row-tokens", "64")
EVALUATION = ("--validate-rows", "1", "--validate-row-tokens", "64", "--sample-tokens", "0")
CONVERT = RUNS["convert"]
QUICK = ("--rows", "2", *SHORT, *EVALUATION, "--quality", "fast", "--fail-ratio", "100")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("source") / "tiny", num_hidden_layers=1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the checks that ran, which still do their work."""
    made: list[str] = []

    def counted(check: Callable) -> Callable:
        @functools.wraps(check)
        def counting(*arguments: object, **options: object) -> object:
            made.append(check.__name__)
            return check(*arguments, **options)

        return counting

    for name in ("find_fit", "preflight", "check_disk"):
        monkeypatch.setattr(preparation, name, counted(getattr(preparation, name)))
    return made


def run(*arguments: object) -> None:
    words = [str(word) for word in (*arguments, *QUICK, "--device", "cpu", "--no-prefect")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output


def test_measurement_made_anew_needs_no_more_than_a_new_one(source: Path, tmp_path: Path) -> None:
    rows = {"rows": 2, "row_tokens": 64, "measure_rows": 1, "measure_row_tokens": 64}
    calibration = {"text": "standard", **rows}
    out = tmp_path / "m.json"
    config = MeasureConfig(source=source, out=out, calibration=calibration, device="cpu")

    usual, anew = (prepare(RUNS["measure"], config, anew=anew).plan for anew in (False, True))

    assert {*anew.left} == {"tokenize", "sensitivity", "measure"}
    assert anew.left == usual.left


@pytest.mark.parametrize("quality", ["fast", "best", "exllamav2"])
def test_conversion_made_anew_needs_what_a_new_one_does(
    source: Path, tmp_path: Path, quality: str
) -> None:
    config = small_config(source, tmp_path / "out", quality=quality)

    usual, anew = (prepare(CONVERT, config, anew=anew).plan for anew in (False, True))

    assert anew.left == usual.left
    assert anew.stages == ()


def test_options_without_effect_are_named_before_any_work(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(CONVERT, small_config(source, tmp_path / "out", max_memory="8GB", device="cpu"))

    assert "`--max-memory` limits the memory of a GPU" in caplog.text


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"gpu_split": "20,24", "device": "cpu"}, "among GPUs, and the device is `cpu`; leave out"),
        ({"devices": "a", "device": "cpu"}, "`--devices a` is not a list such as `0,2`"),
        ({"gpu_split": "20,24", "device": "cuda"}, "2 sizes are given, but the GPUs that torch"),
        ({"devices": "0,3", "device": "cuda"}, "`--devices` names 3, but the GPUs that torch"),
    ],
)
def test_gpus_of_a_split_that_are_not_there_are_refused_before_any_work(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: dict[str, str],
    message: str,
) -> None:
    monkeypatch.setattr(devices, "resolve_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    with pytest.raises(ConfigError, match=message):
        prepare(CONVERT, small_config(source, tmp_path / "out", **where))


def test_convert_checks_once(source: Path, tmp_path: Path, calls: list[str]) -> None:
    run("convert", source, "--out", tmp_path / "out", "--fit", "8GB", "--context", "64")

    assert calls == ["find_fit", "preflight"]
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.slow
def test_sweep_checks_each_bitrate_once(source: Path, tmp_path: Path, calls: list[str]) -> None:
    run("sweep", source, "--out", tmp_path / "out", "--bpw", "3.5,4")

    assert calls == ["find_fit", "preflight", "preflight", "check_disk"]
    assert (tmp_path / "out" / "3.5bpw" / "model.safetensors").is_file()


def test_without_a_command_the_checks_are_made(
    source: Path, tmp_path: Path, calls: list[str]
) -> None:
    run_locally(small_config(source, tmp_path / "out", bpw=4.0), stages=[TOKENIZE])

    assert calls == ["find_fit", "preflight"]


def test_checks_are_reused_for_the_same_configuration_only(
    source: Path, tmp_path: Path, calls: list[str]
) -> None:
    config = small_config(source, tmp_path / "out", bpw=4.0)

    with reuse_checks(prepare(CONVERT, config)):
        assert prepare(CONVERT, small_config(source, tmp_path / "out", bpw=5.0)).config.bpw == 5.0
        with pytest.raises(PreflightFailed):
            prepare(CONVERT, small_config(source, tmp_path / "out", bpw=2.0))
        prepare(CONVERT, config)
    prepare(CONVERT, config)

    assert calls == ["find_fit", "preflight"] * 4


def test_plans_of_a_sweep_have_the_names_of_its_bitrates(source: Path, tmp_path: Path) -> None:
    config = SweepConfig.model_validate(
        {"source": source, "out": tmp_path / "out", "bpw": [4, 3.5], **small_options()}
    )

    assert list(prepare(RUNS["sweep"], config).plans) == ["3.5bpw", "4.0bpw"]
