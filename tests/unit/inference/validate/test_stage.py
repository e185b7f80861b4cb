"""The verdict and its limits, and the stage's output."""

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conversions import small_config
from stage_runs import foreign_measurement, run_until, text_parquet
from tiny import TEXT, make_tiny

from exl2flow.core.errors import Interrupted, ValidationFailed, WriteFailed
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.validation import ValidateOptions
from exl2flow.core.reports import Score
from exl2flow.core.runtime.progress import Tick, silent
from exl2flow.core.store.files import read_json, write_json
from exl2flow.core.store.stage import SCORE_FILE
from exl2flow.core.store.store import StageFolder
from exl2flow.inference.report.record import read_record
from exl2flow.inference.scoring import evaluate as evaluate_module
from exl2flow.inference.scoring.evaluate import evaluate
from exl2flow.inference.validate import stage as stage_module
from exl2flow.inference.validate.stage import (
    MARKDOWN_FILE,
    PLOT_FILE,
    REPORT_FILE,
    ROWS_PREFIX,
    calibration_text_rows,
    check_verdict,
    guessing,
    verdict,
)
from exl2flow.model import resolve
from exl2flow.quant.tokenize.stage import load_rows

PASSES = 2 * 4  # sublayers of model and source
OPTIONS = ValidateOptions()
GOOD = Score(
    model="m",
    perplexity=10.0,
    reference_perplexity=10.0,
    kl_divergence=0.0,
    kl_median=0.0,
    kl_p99=0.0,
    top1_agreement=1.0,
    tokens=100,
    bytes=100,
)


def scored(perplexity: float, reference: float | None) -> Score:
    return replace(GOOD, perplexity=perplexity, reference_perplexity=reference)


@pytest.mark.parametrize(
    ("perplexity", "warns", "fails"),
    [
        (9.0, 0, 0),
        (13.0, 0, 0),
        (13.1, 1, 0),
        (30.0, 1, 0),
        (30.1, 0, 1),
        (math.inf, 0, 1),
        (math.nan, 0, 1),
    ],
)
def test_perplexity_is_judged_by_that_of_the_source(
    perplexity: float, warns: int, fails: int
) -> None:
    warnings, failures = verdict(scored(perplexity, 10.0), None, OPTIONS)

    assert (len(warnings), len(failures)) == (warns, fails)


def test_words_of_the_verdict_state_both_perplexities() -> None:
    (warning,), _ = verdict(scored(15.0, 10.0), None, OPTIONS)
    _, (failure,) = verdict(scored(40.0, 10.0), None, OPTIONS)

    assert warning == "perplexity 15.00 is 1.50 x the source's 10.00, above 1.3 x"
    assert failure == "perplexity 40.00 is 4.00 x the source's 10.00, above 3 x"


def test_limits_can_be_set() -> None:
    options = ValidateOptions(warn_perplexity_ratio=1.05, fail_perplexity_ratio=1.2)

    assert verdict(scored(11.0, 10.0), None, options)[0]
    assert verdict(scored(13.0, 10.0), None, options)[1]
    assert verdict(scored(10.4, 10.0), None, options) == ([], [])


@pytest.mark.parametrize(
    ("perplexity", "reference", "warns", "fails"),
    [
        (29.0, 10.0, 0, 0),
        (31.0, 10.0, 1, 0),
        (31.0, 25.0, 0, 0),  # above 30, but the source is not much better
        (1001.0, 10.0, 0, 1),
        (1001.0, 670.0, 0, 0),
        (1001.0, 665.0, 0, 1),
        (math.inf, 10.0, 0, 1),
    ],
)
def test_calibration_perplexity_counts_only_far_above_the_source(
    perplexity: float, reference: float, warns: int, fails: int
) -> None:
    warnings, failures = verdict(GOOD, scored(perplexity, reference), OPTIONS)

    assert (len(warnings), len(failures)) == (warns, fails)


def test_a_source_that_guesses_is_warned_of() -> None:
    (warning,) = guessing(scored(301.0, 301.0), 301)

    assert "weights may be zero" in warning
    assert guessing(scored(301.0, 290.0), 301) == []


def test_failed_report_raises_with_its_folder(tmp_path: Path) -> None:
    report = {"failures": ["perplexity is not finite"], "warnings": ["small"]}
    write_json(tmp_path / REPORT_FILE, report)

    with pytest.raises(ValidationFailed, match=rf"not finite; the report is in `{tmp_path}`"):
        check_verdict(tmp_path)


def test_passed_report_gives_its_warnings(tmp_path: Path) -> None:
    write_json(tmp_path / REPORT_FILE, {"failures": [], "warnings": ["small"]})

    assert check_verdict(tmp_path) == ["small"]


def test_calibration_rows_of_noise_and_random_tokens_do_not_count() -> None:
    ids = torch.arange(5)[:, None].expand(5, 4)

    rows = calibration_text_rows(ids, ["web", "random", "code", "noise", "shuffled"])

    assert rows[:, 0].tolist() == [0, 2, 4]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ConversionConfig:
    """A conversion whose stages the tests share; what differs is how it is validated."""
    tmp_path = tmp_path_factory.mktemp("validate")
    source = make_tiny("llama", tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXT * 10))
    calibration = {
        "text": text_parquet(tmp_path / "text.parquet"),
        "rows": 1,
        "row_tokens": 32,
        "measure_rows": 2,
        "measure_row_tokens": 64,
    }
    return small_config(
        source,
        tmp_path / "out",
        quality="exllamav2",
        measurement=foreign_measurement(tmp_path / "measurement.json", resolve(source)),
        calibration=calibration,
        validate_options=ValidateOptions(
            text=text, rows=2, row_tokens=48, sample_tokens=8, sample_prompt="The quick"
        ),
    )


def validated(config: ConversionConfig, **options: object) -> ConversionConfig:
    changed = config.validate_options.model_copy(update=options)
    return config.model_copy(update={"validate_options": changed})


def test_report_holds_scores_layers_and_sample(config: ConversionConfig) -> None:
    pipeline = run_until(config, "validate")

    report = read_json(pipeline.path("validate") / REPORT_FILE)

    rows = load_rows(pipeline.path("tokenize"), "measure")
    (expected,) = evaluate([config.out], rows, reference=config.source)
    assert report["calibration"]["kl_divergence"] == pytest.approx(expected.kl_divergence)
    assert report["calibration"]["perplexity"] == pytest.approx(expected.perplexity)
    assert report["score"]["tokens"] == 2 * 47
    assert report["score"]["bytes"] == (config.out / "model.safetensors").stat().st_size
    assert report["source_bytes"] == (config.source / "model.safetensors").stat().st_size
    assert [layer["name"] for layer in report["layers"]][-1] == "lm_head"
    assert report["sample"].startswith("The quick")
    assert (report["warnings"], report["failures"]) == ([], [])
    markdown = (pipeline.path("validate") / MARKDOWN_FILE).read_text()
    assert f"{report['score']['kl_divergence']:.5f}" in markdown
    assert (pipeline.path("validate") / PLOT_FILE).read_text().count("<svg") == 1


def test_score_lies_beside_the_model_it_holds_for(config: ConversionConfig) -> None:
    pipeline = run_until(config, "validate")

    report = read_json(pipeline.path("validate") / REPORT_FILE)
    record = read_record(config.out)
    assert record is not None
    assert record.score == {k: v for k, v in report["score"].items() if k != "model"}
    assert record.calibration == {k: v for k, v in report["calibration"].items() if k != "model"}
    assert str(config.out) not in (config.out / SCORE_FILE).read_text()
    assert read_json(config.out / SCORE_FILE)["options"]["rows"] == config.validate_options.rows
    (config.out / SCORE_FILE).unlink()
    assert not pipeline.is_complete("validate")


def test_failed_verdict_is_a_finished_stage(config: ConversionConfig) -> None:
    pipeline = run_until(validated(config, fail_perplexity_ratio=1e-3), "validate")

    assert pipeline.is_complete("validate")
    with pytest.raises(ValidationFailed, match=r"above 0\.001 x"):
        check_verdict(pipeline.path("validate"))
    report = json.loads((pipeline.path("validate") / REPORT_FILE).read_text())
    assert len(report["failures"]) == 1


def test_rows_never_exceed_the_positions_of_the_model(config: ConversionConfig) -> None:
    pipeline = run_until(validated(config, row_tokens=4096, rows=1), "validate")

    report = read_json(pipeline.path("validate") / REPORT_FILE)
    assert report["score"]["tokens"] == 255  # of 256 positions


def test_sample_can_be_left_out(config: ConversionConfig) -> None:
    pipeline = run_until(validated(config, sample_tokens=0), "validate")

    assert read_json(pipeline.path("validate") / REPORT_FILE)["sample"] == ""
    assert "## Sample" not in (pipeline.path("validate") / MARKDOWN_FILE).read_text()


def reports(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in (REPORT_FILE, MARKDOWN_FILE, PLOT_FILE)]


def test_stage_stops_between_sublayers_and_keeps_what_was_scored(
    config: ConversionConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reports(run_until(config, "validate").path("validate"))
    monkeypatch.setattr(evaluate_module, "STATE_BYTES", 1)
    monkeypatch.setattr(evaluate_module, "LEAST_ROWS", 1)
    again = config.model_copy(update={"work_root": tmp_path / "again"})
    pipeline = run_until(again, "compile")
    ticks: list[Tick] = []

    def interrupt(tick: Tick) -> None:
        ticks.append(tick)
        if tick.done == PASSES + 2:  # in the second row
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        pipeline.run("validate", progress=interrupt)
    stopped_at = ticks[-1].done
    ticks.clear()
    pipeline.run("validate", progress=ticks.append)

    assert stopped_at <= PASSES + 3
    assert {tick.total for tick in ticks} == {3 * PASSES + 1}  # three of four rows were left
    assert reports(pipeline.path("validate")) == expected
    assert not list(pipeline.path("validate").glob(f"{ROWS_PREFIX}*"))


def test_nothing_is_scored_again_once_the_report_is_written(
    config: ConversionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = run_until(validated(config, sample_seed=1), "compile")
    with monkeypatch.context() as broken:
        broken.setattr(StageFolder, "remove", full)
        with pytest.raises(WriteFailed):
            pipeline.run("validate", progress=silent)
    folder = pipeline.path("validate")
    assert list(folder.glob(f"{ROWS_PREFIX}*"))
    report = (folder / REPORT_FILE).stat()
    monkeypatch.setattr(stage_module, "evaluate_texts", full)
    ticks: list[Tick] = []

    pipeline.run("validate", progress=ticks.append)

    assert (folder / REPORT_FILE).stat() == report
    assert not list(folder.glob(f"{ROWS_PREFIX}*"))
    assert ticks[-1].done == ticks[-1].total
    assert "kl_divergence=" in ticks[-1].detail


def full(*given: object, **more: object) -> None:
    raise WriteFailed("no space left")
