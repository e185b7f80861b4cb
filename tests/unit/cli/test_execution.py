"""Options that all commands have which run stages: `--dry-run` and `--restart`."""

import json
from pathlib import Path

import pytest
from tiny import make_tiny
from typer.testing import CliRunner, Result

from exl2flow.cli.main import app

SHORT = ("--row-tokens", "64", "--measure-rows", "1", "--measure-row-tokens", "64")
CALIBRATION = ("--rows", "2", *SHORT, "--quality", "fast", "--device", "cpu")
EVALUATION = ("--validate-rows", "1", "--validate-row-tokens", "64", "--sample-tokens", "0")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("source") / "tiny", num_hidden_layers=1)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in (*arguments, *CALIBRATION)])
    assert result.exit_code == 0, result.output
    return result


def test_a_dry_run_of_a_measurement_prints_the_plan_and_makes_nothing(
    source: Path, tmp_path: Path
) -> None:
    words = ("measure", source, "--out", tmp_path / "m.json", "--dry-run")

    people, program = run(*words), run(*words, "--json")

    assert f"output       {tmp_path / 'm.json'}" in people.stdout
    assert "bpw" not in people.stdout
    assert json.loads(program.stdout)["plan"]["layers"] == 1
    assert not list(tmp_path.iterdir())


def test_measure_says_in_json_what_it_made(source: Path, tmp_path: Path) -> None:
    said = json.loads(run("measure", source, "--out", tmp_path, "--json").stdout)

    assert said["measurement"] == str(tmp_path / "measurement.json")
    assert (Path(said["folder"]) / "measurement.json").is_file()
    assert said.keys() == {"plan", "seconds", "measurement", "folder"}


@pytest.mark.slow
def test_restart_of_a_sweep_makes_all_bitrates_anew_and_the_same(
    source: Path, tmp_path: Path
) -> None:
    words = ("sweep", source, "--out", tmp_path / "out", "--bpw", "3.5,4", "--fail-ratio", "100")
    words = (*words, *EVALUATION, "--no-prefect")
    run(*words)
    files = [tmp_path / "out" / name / "model.safetensors" for name in ("3.5bpw", "4.0bpw")]
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]

    repeated, anew = run(*words), run(*words, "--restart")

    assert "cached" in repeated.stderr
    assert "cached" not in anew.stderr
    after = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
    assert [data for data, _ in after] == [data for data, _ in before]
    assert all(new > old for (_, new), (_, old) in zip(after, before, strict=True))
