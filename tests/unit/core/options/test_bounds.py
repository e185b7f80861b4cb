"""The least and the largest value of every bounded option are accepted, those beyond refused."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.base import Options
from exl2flow.core.options.chat import ChatOptions
from exl2flow.core.options.config import (
    AllocateOptions,
    CalibrationOptions,
    ConversionConfig,
    FitOptions,
    RopeOptions,
    RoundingOptions,
    SensitivityOptions,
    TuneOptions,
    ValidateOptions,
)
from exl2flow.core.options.generation import GenerationOptions
from exl2flow.core.options.publication import PublishConfig, PublishOptions
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.options.serving import ServeOptions

CONVERSION = {"source": "model", "out": "out"}
REFINEMENT = {**CONVERSION, "model": "quantized"}
TINY = 5e-324  # the least above 0

# options, field, accepted at the bound, refused just beyond it
CASES: list[tuple[type[BaseModel], str, Any, Any]] = [
    (CalibrationOptions, "rows", 1, 0),
    (CalibrationOptions, "row_tokens", 32, 0),
    (CalibrationOptions, "row_tokens", 64, 63),
    (CalibrationOptions, "measure_rows", 1, 0),
    (CalibrationOptions, "measure_row_tokens", 32, 0),
    (CalibrationOptions, "measure_row_tokens", 64, 63),
    (CalibrationOptions, "share", TINY, 0),
    (CalibrationOptions, "share", 1, 1.001),
    (CalibrationOptions, "seed", 0, -1),
    (CalibrationOptions, "text", "x", ""),
    (RopeOptions, "scale", 1e-6, 0.9e-6),
    (RopeOptions, "scale", 1e6, 1.1e6),
    (RopeOptions, "alpha", 1e-6, 0.9e-6),
    (RopeOptions, "alpha", 1e6, 1.1e6),
    (SensitivityOptions, "rows", 1, 0),
    (SensitivityOptions, "block", 0, -1),
    (SensitivityOptions, "seed", 0, -1),
    (RoundingOptions, "damping", TINY, 0),
    (RoundingOptions, "rounds", 0, -1),
    (RoundingOptions, "sweeps", 1, 0),
    (RoundingOptions, "output_damping", TINY, 0),
    (RoundingOptions, "correction", 0, -TINY),
    (RoundingOptions, "correction", 1, 1.001),
    (RoundingOptions, "fisher_share", 0, -TINY),
    (RoundingOptions, "fisher_share", 1, 1.001),
    (TuneOptions, "steps", 0, -1),
    (TuneOptions, "tokens", 32, 31),
    (TuneOptions, "norm_rate", 0, -TINY),
    (TuneOptions, "scale_rate", 0, -TINY),
    (TuneOptions, "embedding_rate", 0, -TINY),
    (TuneOptions, "code_rate", 0, -TINY),
    (TuneOptions, "held_out_rows", 1, 0),
    (TuneOptions, "interval", 1, 0),
    (TuneOptions, "patience", 1, 0),
    (TuneOptions, "seed", 0, -1),
    (AllocateOptions, "power", TINY, 0),
    (AllocateOptions, "power", 8, 8.001),
    (AllocateOptions, "rounds", 0, -1),
    (ValidateOptions, "rows", 1, 0),
    (ValidateOptions, "row_tokens", 2, 1),
    (ValidateOptions, "warn_perplexity_ratio", TINY, 0),
    (ValidateOptions, "fail_perplexity_ratio", TINY, 0),
    (ValidateOptions, "sample_tokens", 0, -1),
    (ValidateOptions, "sample_seed", 0, -1),
    (FitOptions, "memory", 1_000_000, 999_999),
    (FitOptions, "context", 1, 0),
    (ConversionConfig, "bpw", 2, 1.999),
    (ConversionConfig, "bpw", 8, 8.001),
    (ConversionConfig, "bpw_total", 2, 1.999),
    (ConversionConfig, "bpw_total", 16, 16.001),
    (ConversionConfig, "target_bytes", 1, 0),
    (ConversionConfig, "max_memory", 1_000_000, 999_999),
    (RefinementConfig, "held_out_rows", 1, 0),
    (PublishOptions, "max_kl", TINY, 0),
    (PublishOptions, "sample_tokens", 1, 0),
    (ChatOptions, "user_name", "x", ""),
    (ChatOptions, "bot_name", "x", ""),
    (ChatOptions, "max_answer", 1, 0),
    (ChatOptions, "reserve", 1, 0),
    (ChatOptions, "seed", 0, -1),
    (GenerationOptions, "max_new_tokens", 1, 0),
    (GenerationOptions, "min_new_tokens", 0, -1),
    (GenerationOptions, "tokens", 1, 0),
    (GenerationOptions, "slots", 1, 0),
    (GenerationOptions, "max_tokens", 1, 0),
    (GenerationOptions, "rope_scale", 1e-6, 0.9e-6),
    (GenerationOptions, "rope_scale", 1e6, 1.1e6),
    (GenerationOptions, "rope_alpha", 1e-6, 0.9e-6),
    (GenerationOptions, "rope_alpha", 1e6, 1.1e6),
    (GenerationOptions, "rope_yarn", 1, 0.999),
    (GenerationOptions, "rope_yarn", 1e6, 1.1e6),
    (GenerationOptions, "draft_tokens", 1, 0),
    (GenerationOptions, "draft_tokens", 15, 16),
    (GenerationOptions, "state_memory", 0, 1),
    (ServeOptions, "port", 0, -1),
    (ServeOptions, "port", 65535, 65536),
    (ServeOptions, "swap_wait", 0, -TINY),
    (ServeOptions, "unload_after", TINY, 0),
    (ServeOptions, "drain", 0, -TINY),
    (ServeOptions, "waiting", 0, -1),
    (ServeOptions, "wait_seconds", TINY, 0),
    (ServeOptions, "max_answer", 1, 0),
    (PublishConfig, "models", (Path("a"),), ()),
]
NEEDED: dict[type[BaseModel], dict[str, Any]] = {
    ConversionConfig: CONVERSION,
    RefinementConfig: REFINEMENT,
    PublishOptions: {"repo": "org/name"},
    PublishConfig: {"repo": "org/name"},
    FitOptions: {"memory": "24GB"},
}


@pytest.mark.parametrize(("options", "field", "accepted", "refused"), CASES, ids=str)
def test_bound_is_where_it_is_documented(
    options: type[BaseModel], field: str, accepted: object, refused: object
) -> None:
    needed = NEEDED.get(options, {})

    found = options.model_validate({**needed, field: accepted})

    assert getattr(found, field) == accepted
    with pytest.raises(ValidationError, match=field):
        options.model_validate({**needed, field: refused})


def all_options(base: type[Options]) -> Iterator[type[Options]]:
    """Yield all option groups below a base."""
    for group in base.__subclasses__():
        yield group
        yield from all_options(group)


def takes_float(annotation: object) -> bool:
    return annotation is float or any(map(takes_float, get_args(annotation)))


FLOATS = sorted(
    {
        (group.__name__, name): (group, name)
        for group in all_options(Options)
        if group.__module__.startswith("exl2flow.")
        for name, field in group.model_fields.items()
        if takes_float(field.annotation)
    }.items()
)


FOR_EVER = {"swap_wait", "unload_after", "drain", "wait_seconds"}  # times may be infinite


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        (*found, value)
        for _, found in FLOATS
        for value in map(float, ("inf", "-inf", "nan"))
        if value != float("inf") or found[1] not in FOR_EVER
    ],
    ids=str,
)
def test_no_option_is_infinite_or_nan(group: type[Options], name: str, value: float) -> None:
    field = group.model_fields[name]
    given = [value] if "tuple" in str(field.annotation) else value

    with pytest.raises(ValidationError) as raised:
        group.model_validate({name: given})

    assert name in {error["loc"][0] for error in raised.value.errors()}


# field of the sampling settings, accepted at the bound, refused just beyond it
SETTINGS: list[tuple[str, float, float]] = [
    *((name, 0, -TINY) for name in ("temperature", "smoothing_factor", "min_temp", "max_temp")),
    *((name, 0, -TINY) for name in ("temp_exponent", "top_a", "mirostat_tau", "mirostat_eta")),
    *((name, 0, -TINY) for name in ("top_p", "min_p", "tfs", "typical", "dry_multiplier")),
    *((name, 0, -TINY) for name in ("dry_base", "xtc_probability", "xtc_threshold")),
    *((name, 1, 1.001) for name in ("top_p", "min_p", "tfs", "typical")),
    *((name, 1, 1.001) for name in ("xtc_probability", "xtc_threshold")),
    *((name, 0, -1) for name in ("top_k", "repetition_decay", "dry_range")),
    ("repetition_penalty", TINY, 0.0),
    ("repetition_range", -1, -2),
    ("dry_allowed_length", 1, 0),
    ("dry_max_ngram", 1, 0),
    ("dry_max_ngram", 1024, 1025),
]


@pytest.mark.parametrize(("field", "accepted", "refused"), SETTINGS)
def test_bound_of_a_sampling_setting_is_where_it_is_documented(
    field: str, accepted: float, refused: float
) -> None:
    assert getattr(SamplingSettings(**{field: accepted}), field) == accepted
    shown = int(refused) if float(refused).is_integer() else refused

    with pytest.raises(ConfigError, match=f"`{field}` is {shown}; it must be "):
        SamplingSettings(**{field: refused})


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("top_k", 1.5, "a whole number"),
        ("temperature", "hot", "a number"),
        ("temperature", float("nan"), "a finite number"),
        ("temperature", -1, "0 or more"),
        ("dry_range", -1, "0 or more"),
        ("top_p", 2, "between 0 and 1"),
    ],
)
def test_refused_sampling_setting_says_what_it_must_be(field: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SamplingSettings(**{field: value})

    assert str(raised.value) == f"`{field}` is {value}; it must be {rule}"


@pytest.mark.parametrize(
    ("multiplier", "searched", "is_refused"),
    [(1.0, 0, False), (1.0, 1, True), (1.0, 20, True), (1.0, 21, False), (0.0, 20, False)],
)
def test_dry_searches_more_than_its_longest_repetition(
    multiplier: float, searched: int, is_refused: bool
) -> None:
    given = {"dry_multiplier": multiplier, "dry_range": searched}
    with (
        pytest.raises(ConfigError, match=f"`dry_range` is {searched}")
        if is_refused
        else nullcontext()
    ):
        SamplingSettings(**given)


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0, True), (0.0099, True), (0.01, False)])
def test_least_temperature_that_samples(temperature: float, is_greedy: bool) -> None:
    assert SamplingSettings(temperature=temperature).is_greedy is is_greedy


def test_greedy_settings_report_the_probabilities_of_the_model() -> None:
    greedy = SamplingSettings.greedy(min_p=0.5)

    assert greedy == SamplingSettings(temperature=1.0, top_k=1, top_p=0.0, min_p=0.5)
