"""Presets and targets on a tiny model, from the command line to the bytes of the result."""

import json
from pathlib import Path
from typing import Any

import pytest
from conversions import small_config
from tiny import make_tiny
from typer.testing import CliRunner, Result

from exl2flow.cli.main import app
from exl2flow.inference.report.inspection import inspect_model
from exl2flow.pipeline.local import run_locally

ROWS = ("--rows", "8", "--row-tokens", "96", "--measure-rows", "2", "--measure-row-tokens", "96")
VALIDATION = ("--validate-rows", "2", "--validate-row-tokens", "96", "--sample-tokens", "2")
QUICK = (*ROWS, *VALIDATION, "--fail-ratio", "100", "--no-prefect", "--device", "cpu", "--json")
BITS = 4.25


def convert(root: Path, out: str, *arguments: object) -> Result:
    """Convert the model in `root`; conversions share a work root."""
    places = ["convert", root / "source", "--out", root / out, "--work-root", root / "work"]
    return CliRunner().invoke(app, [str(word) for word in (*places, *QUICK, *arguments)])


def converted(root: Path, out: str, *arguments: object) -> dict[str, Any]:
    """Convert, and return the record of the output with what `--json` said."""
    result = convert(root, out, *arguments)
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads((root / out / "exl2flow.json").read_bytes())
    return {**record, "said": json.loads(result.stdout), "steps": result.stderr}


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality")
    make_tiny("llama", folder / "source", num_hidden_layers=1)
    return folder


@pytest.fixture(scope="module")
def fast(root: Path) -> dict[str, Any]:
    return converted(root, "fast", "--quality", "fast", "--bpw", BITS)


@pytest.fixture(scope="module")
def original(root: Path) -> dict[str, Any]:
    return converted(root, "original", "--quality", "exllamav2", "--bpw", BITS)


def test_the_preset_is_on_record_with_all_that_it_filled_and_what_was_given(
    fast: dict[str, Any], original: dict[str, Any]
) -> None:
    options = fast["options"], original["options"]

    assert [found["quality"] for found in options] == ["fast", "exllamav2"]
    assert [found["rounding"]["rounds"] for found in options] == [1, 0]
    assert [found["rounding"]["scale_search"] for found in options] == ["column", "grid"]
    assert [found["calibration"]["rows"] for found in options] == [8, 8]  # given


def test_only_factors_price_matrices(fast: dict[str, Any], original: dict[str, Any]) -> None:
    assert fast["allocation"]["objective"] == "nats"
    assert fast["predicted_kl"] > 0
    assert "sensitivity" in fast["steps"]
    assert original["allocation"]["objective"] == "power 2"
    assert original["predicted_kl"] is None
    assert "sensitivity" not in original["steps"]


def test_the_usual_algorithm_comes_nearer_than_the_original_in_as_many_bits(
    fast: dict[str, Any], original: dict[str, Any]
) -> None:
    ours, theirs = (found["said"]["score"]["kl_divergence"] for found in (fast, original))
    sizes = [found["allocation"]["used_bits"] for found in (fast, original)]

    assert sizes[0] <= fast["allocation"]["budget_bits"] == original["allocation"]["budget_bits"]
    assert 0 < ours < 0.9 * theirs


@pytest.mark.parametrize(
    "target", ["--target-bytes", pytest.param("--bpw-total", marks=pytest.mark.slow)]
)
def test_a_total_is_kept_to_and_the_head_chosen(
    target: str, root: Path, fast: dict[str, Any]
) -> None:
    most = bytes_of(root / "fast")
    weights = fast["said"]["plan"]["weights"]
    value = most if target == "--target-bytes" else 8 * most / weights

    made = converted(root, target[2:], "--quality", "fast", target, value)

    assert 0.99 * most <= bytes_of(root / target[2:]) <= most
    assert made["allocation"]["objective"] == "nats"
    assert "measure 1/1 cached" in made["steps"]
    (head,) = inspect_model(root / target[2:]).others
    assert head.name == "lm_head"
    assert head.bits == made["layers"][-1]["bits"]
    assert made["options"]["head_bits"] is None


def test_a_given_head_stays_with_a_total(root: Path, fast: dict[str, Any]) -> None:
    most = bytes_of(root / "fast")

    converted(root, "head", "--quality", "fast", "--target-bytes", most, "--head-bits", 8)

    (head,) = inspect_model(root / "head").others
    assert head.bit_widths == (8,)
    assert bytes_of(root / "head") <= most


def test_a_head_that_would_not_be_measured_is_refused_before_any_work(root: Path) -> None:
    result = convert(root, "none", "--quality", "exllamav2", "--target-bytes", 120_000)

    assert result.exit_code == 1
    assert "`--head-bits`" in result.stderr
    assert not (root / "none").exists()


@pytest.mark.slow
def test_the_best_quality_tries_allocations_and_tunes(root: Path) -> None:
    config = small_config(
        root / "source",
        root / "best",
        quality="best",
        bpw=BITS,
        work_root=root / "work",
        calibration={"rows": 4, "row_tokens": 96, "measure_rows": 2, "measure_row_tokens": 96},
        tune={"steps": 8, "interval": 4},
    )

    made = run_locally(config)

    record = json.loads((made.out / "exl2flow.json").read_bytes())
    assert list(made.stages)[-5:] == ["allocate", "quantize", "tune", "compile", "validate"]
    assert {"estimate", "uniform", "corrected 1"} <= {
        trial["name"] for trial in record["allocation"]["tried"]
    }
    assert record["tuning"]
    assert inspect_model(made.out).bpw <= BITS
