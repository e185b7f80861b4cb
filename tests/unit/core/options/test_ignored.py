"""Options without effect are named before any work, and change no fingerprint."""

from pathlib import Path
from typing import Any

import pytest
from conversions import small_config
from measurements import written_in_nats
from tiny import make_tiny

from exl2flow.core.options.config import PRESETS, ConversionConfig, RunOptions
from exl2flow.core.options.ignored import ignored
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.store.stage import Pipeline
from exl2flow.model import resolve
from exl2flow.pipeline.stages import STAGES

KINDS: dict[type[RunOptions], dict[str, str]] = {
    ConversionConfig: {},
    MeasureConfig: {},
    RefinementConfig: {"model": "quantized"},
}
WITHOUT_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"max_memory": "8GB"}, "--max-memory"),
    ({"calibration": {"share": 0.3}}, "--calibration-share"),
    ({"calibration": {"text": "mine.parquet", "share": 0.3}}, "--calibration-share"),
    ({"calibration": {"text": "mine.parquet", "seed": 3}}, "--seed"),
    ({"sensitivity": {"kind": "error", "rows": 3}}, "--sensitivity-rows"),
    ({"gpu_split": "auto", "validate_options": {"sample_tokens": 0}}, "--gpu-split"),
    ({"allocate": {"objective": "log"}}, "--objective"),
    ({"allocate": {"power": 3}}, "--objective-power"),
    (
        {"sensitivity": {"kind": "error"}, "allocate": {"objective": "log", "power": 3}},
        "--objective-power",
    ),
]
WITH_EFFECT: list[dict[str, Any]] = [
    {"calibration": {"text": "chat", "share": 0.3, "seed": 3}},
    {"calibration": {"text": "self", "share": 0.3, "seed": 3}},
    {"calibration": {"seed": 3}},
    {"devices": "0,1"},
    {"reserve": "0", "calibration": {"text": "self"}, "validate_options": {"sample_tokens": 0}},
    {"sensitivity": {"rows": 3}},
    {"sensitivity": {"kind": "error"}, "allocate": {"objective": "log"}},
    {"sensitivity": {"kind": "error"}, "allocate": {"power": 3}},
    {"measurement": "found.json", "allocate": {"objective": "log"}},
]


def conversion(**values: Any) -> ConversionConfig:
    return ConversionConfig.model_validate({"source": "model", "out": "out", **values})


@pytest.mark.parametrize(("values", "option"), WITHOUT_EFFECT)
def test_option_without_effect_is_named(values: dict[str, Any], option: str) -> None:
    [text] = ignored(conversion(**values), "cpu")

    assert text.startswith(f"`{option}` ")
    assert text.endswith(": it has no effect")


@pytest.mark.parametrize("values", WITH_EFFECT)
def test_option_with_an_effect_is_not_named(values: dict[str, Any]) -> None:
    assert ignored(conversion(**values), "cpu") == []


@pytest.mark.parametrize("quality", PRESETS)
@pytest.mark.parametrize("kind", KINDS)
def test_presets_have_no_option_without_effect(kind: type[RunOptions], quality: str) -> None:
    given = {"source": "model", "out": "out", "quality": quality, **KINDS[kind]}

    assert ignored(kind.model_validate(given), "cpu") == []
    assert ignored(kind.model_validate(given | {"max_memory": "8GB"}), "cuda:0") == []


def fingerprints(source: Path, **values: Any) -> dict[str, str]:
    config = small_config(source, source.parent / "out", **values)
    return {n: r.fingerprint for n, r in Pipeline(config, STAGES, device="cpu").refs.items()}


def test_option_without_effect_changes_no_fingerprint(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "model")
    given = written_in_nats(tmp_path / "measurement.json", resolve(source))
    log, power = {"objective": "log"}, {"objective": "log", "power": 3}
    error = {"kind": "error"}

    assert fingerprints(source, allocate=power) == fingerprints(source)
    for where in ({"max_memory": "1GiB"}, {"gpu_split": "20,24", "devices": "1,0"}):
        assert fingerprints(source, **where) == fingerprints(source)
    assert fingerprints(source, measurement=given, allocate=log) == fingerprints(
        source, measurement=given
    )
    of_errors = [fingerprints(source, sensitivity=error, allocate=a) for a in (log, power, {})]
    assert of_errors[0] == of_errors[1]
    assert of_errors[0]["allocate"] != of_errors[2]["allocate"]
