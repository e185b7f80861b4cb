"""`exl2flow clean` on the work root of a tiny conversion."""

import json
import shutil
from pathlib import Path

import pytest
from conversions import small_config, snapshot
from refinements import refinement, rough_model
from stage_runs import text_parquet
from tiny import make_tiny
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.cli.output.console import printable
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import Tick, reporting_to
from exl2flow.pipeline.local import run_locally


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ConversionConfig:
    """A conversion that is finished."""
    folder = tmp_path_factory.mktemp("clean")
    calibration = {
        "text": str(text_parquet(folder / "text.parquet")),
        "rows": 2,
        "row_tokens": 64,
        "measure_rows": 1,
        "measure_row_tokens": 64,
    }
    config = small_config(
        make_tiny("llama", folder / "model", num_hidden_layers=1),
        folder / "out",
        calibration=calibration,
    )
    run_locally(config)
    return config


def quantized(config: ConversionConfig) -> list[Path]:
    return sorted(config.work_dir_root.glob("*/quantize/*/**/*.safetensors"))


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["clean", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def stages_that_worked(config: ConversionConfig) -> set[str]:
    ticks: list[Tick] = []
    with reporting_to(ticks.append):
        run_locally(config)
    return {tick.stage for tick in ticks if tick.detail != "cached"}


def test_table_shows_what_why_and_how_much_and_removes_nothing(config: ConversionConfig) -> None:
    before = snapshot(config.work_dir_root)
    size = sum(path.stat().st_size for path in quantized(config))

    text = " ".join(run(config.work_dir_root).split())

    assert "its tensors are in the output, which is complete" in text
    assert f"{size / 1e3:.2f} kB can go; `--yes` removes it" in text
    assert snapshot(config.work_dir_root) == before


def test_table_replaces_control_characters_of_folders(
    config: ConversionConfig, tmp_path: Path
) -> None:
    place = tmp_path / "[b]\x1b[2J\x9b2J"
    shutil.copytree(config.work_dir_root, place)

    text = run(place)

    assert "[b]\ufffd[2J\ufffd2J" in text.replace("\n", "").replace(" ", "")
    assert printable(text) == text


def test_json_has_paths_reasons_and_bytes(config: ConversionConfig) -> None:
    found = json.loads(run(config.work_dir_root, "--json"))

    (item,) = found["items"]
    assert item["path"] == str(quantized(config)[0].parents[1])
    assert item["bytes"] == found["bytes"] == sum(p.stat().st_size for p in quantized(config))
    assert not found["removed"]


def test_folder_without_work_root_is_wrong_usage(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["clean", str(tmp_path)])

    assert result.exit_code == 2
    assert "is not a work root" in result.output


def test_cleaned_conversion_is_repeated_without_work_and_continued_with_other_options(
    config: ConversionConfig,
) -> None:
    output = snapshot(config.out)

    text = run(config.work_dir_root, "--yes")

    assert "removed" in text
    assert quantized(config) == []
    assert stages_that_worked(config) == set()
    assert snapshot(config.out) == output
    weights = (config.out / "model.safetensors").read_bytes()
    (config.out / "model.safetensors").unlink()
    assert stages_that_worked(config) == {"quantize", "compile"}  # the score is still true
    assert (config.out / "model.safetensors").read_bytes() == weights


def test_conversion_cleans_up_after_itself_if_it_shall(config: ConversionConfig) -> None:
    made = config.model_copy(
        update={"bpw": 3.0, "out": config.out.with_name("other"), "clean_after": True}
    )

    run_locally(made)

    assert quantized(config) == []
    assert (made.out / "model.safetensors").exists()
    assert "clean_after" not in json.loads((made.out / "exl2flow.json").read_text())["options"]


def test_refinement_cleans_up_after_itself_if_it_shall(tmp_path: Path) -> None:
    source, model = rough_model(tmp_path, "llama", num_hidden_layers=1)
    config = refinement(source, model, tmp_path / "out", clean_after=True)

    made = run_locally(config)

    assert not list(made.stages["refine"].rglob("*.safetensors"))
    assert (made.out / "model.safetensors").exists()
    assert "clean_after" not in json.loads((made.out / "exl2flow.json").read_text())["options"]
