"""`exl2flow why` and the plan of a repeated command, on a tiny conversion."""

import json
import shutil
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from stage_runs import text_parquet
from tiny import make_tiny
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.core.store.store import MANIFEST, StageFolder

QUICK = ("--quality", "fast", "--device", "cpu", "--no-prefect", "--fail-ratio", "100")
QUICK += ("--row-tokens", "64", "--measure-rows", "1", "--measure-row-tokens", "64")
QUICK += ("--validate-rows", "1", "--validate-row-tokens", "64", "--sample-tokens", "0")


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


failed = partial(run, code=2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished conversion and all that it used."""
    folder = tmp_path_factory.mktemp("why")
    text_parquet(folder / "text.parquet")
    make_tiny("llama", folder / "model", num_hidden_layers=1)
    convert(folder)
    return folder


def convert(folder: Path, *more: object) -> str:
    given = ["--out", folder / "out", "--calibration", folder / "text.parquet", "--rows", "2"]
    return run("convert", folder / "model", *given, *QUICK, *more)


def why(folder: Path, *more: object) -> dict:
    return json.loads(run("why", folder / "out", *more, "--json"))


def states(found: dict) -> dict[str, str]:
    return {each["stage"]: each["state"] for each in found["stages"]}


def test_finished_conversion_has_nothing_to_do(finished: Path) -> None:
    found = why(finished)

    assert set(states(found).values()) == {"finished"}
    assert list(states(found))[-1] == "validate"
    assert found["run"]["out"] == str(finished / "out")


def test_dry_run_with_other_options_names_them_and_what_is_done_again(finished: Path) -> None:
    text = convert(finished, "--validate-rows", "2", "--rounds", "2", "--dry-run")

    assert "changed `--rounds` 1 -> 2; `--validate-rows` 1 -> 2" in text
    assert "again quantize, compile, validate" in text


def test_dry_run_of_the_same_command_names_no_change(finished: Path) -> None:
    text = convert(finished, "--dry-run")

    assert "changed" not in text
    assert "again" not in text


def test_changed_calibration_file_is_named(finished: Path, tmp_path: Path) -> None:
    text = finished / "text.parquet"
    kept = shutil.copy2(text, tmp_path / "kept")
    pq.write_table(pq.read_table(text).slice(1), text)
    try:
        said = run("why", finished / "out")
        one = why(finished, "quantize")
    finally:
        shutil.copy2(kept, text)

    assert "changed contents of `--calibration`" in said
    assert "again tokenize, sensitivity, measure, allocate, quantize, compile, validate" in said
    assert states(one) == {"quantize": "again"}


def test_folder_of_a_stage_stands_for_its_run(finished: Path) -> None:
    (folder,) = (finished / ".exl2flow").glob("*/measure/*")

    found = json.loads(run("why", folder, "--json"))

    assert states(found) == {"measure": "finished"}


def test_run_is_found_before_its_output_exists(finished: Path, tmp_path: Path) -> None:
    moved = tmp_path / ".exl2flow"
    shutil.copytree(finished / ".exl2flow", moved)
    shutil.rmtree(next(moved.glob("*/compile")))

    found = json.loads(run("why", finished / "out", "--work-root", moved, "--json"))

    assert found["run"]["work_root"] == str(moved)
    assert states(found)["quantize"] == states(found)["validate"] == "finished"
    assert states(found)["compile"] == "begins"


@pytest.mark.parametrize("stage", ["compose", "tune"])
def test_stage_that_the_run_does_not_have_is_wrong_usage(finished: Path, stage: str) -> None:
    said = failed("why", finished / "out", stage)

    assert f"no stage `{stage}`; choose one of `tokenize`, `sensitivity`," in said


def test_bitrate_of_a_sweep_is_found_beside_the_folder_of_the_sweep(
    finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "sweep").mkdir()
    shutil.copytree(finished / ".exl2flow", tmp_path / ".exl2flow")
    for path in (tmp_path / ".exl2flow").glob(f"*/*/*/{MANIFEST}"):
        folder = StageFolder.load(path.parent)
        assert folder is not None
        assert folder.manifest.run is not None
        folder.manifest.run.config["out"] = str(tmp_path / "sweep" / "2.5bpw")
        folder.save()

    found = json.loads(run("why", tmp_path / "sweep" / "2.5bpw", "measure", "--json"))

    assert states(found) == {"measure": "finished"}
    assert found["run"]["work_root"] == str(tmp_path / ".exl2flow")


def test_unknown_output_is_wrong_usage_and_the_known_ones_are_named(finished: Path) -> None:
    said = failed("why", finished / "elsewhere")

    assert f"give one of `{finished / 'out'}`, or the folder of its checkpoints" in said


def test_a_moved_output_is_asked_about_by_its_old_name(finished: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved" / "out"
    moved.mkdir(parents=True)
    root = finished / ".exl2flow"
    old = finished / "out"
    away = old.rename(finished / "elsewhere-now")
    try:
        said = failed("why", moved, "--work-root", root)
        found = run("why", old, "--work-root", root)
    finally:
        away.rename(old)

    assert f"`{old}` (which is no longer there)" in said
    assert f"name the one it was made as: `exl2flow why {old}`" in said
    assert found


def test_work_roots_without_runs_are_named_with_what_to_do(tmp_path: Path) -> None:
    roots = [tmp_path / "a" / ".exl2flow", tmp_path / ".exl2flow"]

    assert (
        f"no run into `{tmp_path / 'a' / 'out'}` is known in `{roots[0]}` and `{roots[1]}`; "
        "name the folder of its checkpoints with `--work-root`"
    ) in failed("why", tmp_path / "a" / "out")
    assert f"is known in `{roots[1]}`; name" in failed(
        "why", tmp_path / "out", "--work-root", roots[1]
    )


def test_stage_of_a_version_without_runs_is_wrong_usage(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")

    assert "repeat the command with `--dry-run`" in failed("why", tmp_path)
