"""What the plan says of calibration, and what is refused before the run."""

from pathlib import Path

import pytest
import torch
from conversions import small_config
from tiny import make_tiny

from exl2flow.core.config import ConversionConfig
from exl2flow.core.errors import ChatTemplateError, PreflightFailed, StoreError
from exl2flow.core.refine import RefinementConfig
from exl2flow.model import resolve
from exl2flow.quant.forecast.calibration import (
    calibration_in_words,
    check_calibration,
    composing_bytes,
)
from exl2flow.quant.forecast.preflight import preflight

SIZES = {"rows": 115, "row_tokens": 64, "measure_rows": 19, "measure_row_tokens": 96}
CPU = torch.device("cpu")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model")


def config_of(source: Path, text: str, **values: object) -> ConversionConfig:
    calibration = {**SIZES, "text": text, **values}
    return small_config(source, source.parent / "out", calibration=calibration)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("standard", ""),
        ("mine.parquet", ""),
        ("chat", "; 58 of the rows are dialogues"),
        ("self", "; the model first writes 58 of the rows itself, 32 at a time"),
    ],
)
def test_the_plan_says_what_the_rows_are(source: Path, text: str, words: str) -> None:
    said = calibration_in_words(config_of(source, text), resolve(source))

    assert said == f"115 rows x 64 tokens, measured on 19 x 96{words}"


@pytest.mark.parametrize(("rows", "judging"), [(115, 4), (9, 4), (4, 2), (2, 1)])
def test_the_plan_of_a_refinement_says_how_many_rows_judge(
    source: Path, rows: int, judging: int
) -> None:
    plain = config_of(source, "standard", rows=rows)
    config = RefinementConfig(
        source=source,
        model=source.parent / "quantized",
        out=plain.out,
        calibration=plain.calibration,
    )

    said = calibration_in_words(config, resolve(source))

    assert said == f"{rows} rows x 64 tokens, of which {judging} are set aside to judge"


def test_a_missing_template_is_among_the_problems(source: Path) -> None:
    with pytest.raises(PreflightFailed, match="no chat template"):
        preflight(config_of(source, "chat"))


def test_a_template_that_refuses_plain_turns_is_refused(source: Path) -> None:
    (source / "chat_template.jinja").write_text("{{ raise_exception('tools only') }}")

    with pytest.raises(ChatTemplateError, match="tools only"):
        check_calibration(config_of(source, "chat"), resolve(source), CPU)


def test_a_template_that_works_is_no_problem(source: Path) -> None:
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")

    assert "58 of the rows are dialogues" in preflight(config_of(source, "chat")).calibration


def test_writing_needs_memory_for_the_whole_model_and_its_cache(source: Path) -> None:
    spec = resolve(source)

    none, some, more = (
        composing_bytes(config, spec, CPU)
        for config in (
            config_of(source, "standard"),
            config_of(source, "self"),
            config_of(source, "self", row_tokens=128),
        )
    )

    weights = (source / "model.safetensors").stat().st_size  # fp32, too
    # keys and values of 2 layers with 2 heads of 16, of 32 rows of 96 tokens
    assert some == pytest.approx(weights + 4 * 2 * 2 * 2 * 16 * 32 * 96, rel=0.02)
    assert more - some == 4 * 2 * 2 * 2 * 16 * 32 * 32
    assert none == 0
    assert composing_bytes(config_of(source, "self"), spec, torch.device("cuda")) == 0


def test_a_model_larger_than_the_gpu_is_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 2000))
    cuda = torch.device("cuda")

    check_calibration(config_of(source, "standard"), resolve(source), cuda)
    with pytest.raises(StoreError, match=r"the whole model needs 0\.0 GB .* another calibration"):
        check_calibration(config_of(source, "self"), resolve(source), cuda)
