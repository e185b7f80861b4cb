from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from exl2flow.cli.options import Setting, build, settings_of
from exl2flow.cli.options.setting import group_of
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.config import (
    PRESETS,
    ConversionConfig,
    RoundingOptions,
    TuneOptions,
    ValidateOptions,
)
from exl2flow.core.options.generation import GenerationOptions
from exl2flow.core.options.publication import PublishConfig, PublishOptions
from exl2flow.core.options.sweep import SweepConfig

CONVERSION, SWEEP = settings_of(ConversionConfig), settings_of(SweepConfig)
EVALUATION = settings_of(ValidateOptions)
SETTINGS = [s for s in (*CONVERSION, *EVALUATION) if s.panel]
GIVEN_OTHERWISE = {"clean_after"}  # the command `clean`; it is meant for servers


def conversion(values: Mapping[str, object]) -> ConversionConfig:
    return build(ConversionConfig, {"source": Path("model"), "out": Path("out"), **values})


def sweep(values: Mapping[str, object]) -> SweepConfig:
    return build(SweepConfig, {"source": Path("model"), "out": Path("out"), **values})


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        group = group_of(field)
        if group is not None:
            yield from leaves(group, f"{prefix}{name}.")
        else:
            yield prefix + name


# presets set them, the command line does not
IN_PYTHON_ONLY = {f"tune.{name}" for name in TuneOptions.model_fields}
IN_PYTHON_ONLY |= {f"rounding.{name}" for name in RoundingOptions.model_fields} - {
    "rounding.rounds",
    "rounding.expert_tokens",
}
IN_PYTHON_ONLY |= {"sensitivity.block", "sensitivity.seed", "allocate.rounds"}
IN_PYTHON_ONLY |= {"publish.sample_tokens", "publish.token_block"}  # the latter: `--token-block`


def test_every_field_of_the_configuration_has_an_option() -> None:
    fields = {setting.field for setting in CONVERSION}

    assert fields == set(leaves(ConversionConfig)) - GIVEN_OTHERWISE - IN_PYTHON_ONLY


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.flag)
def test_an_option_says_what_it_means_and_what_holds_without_it(setting: Setting) -> None:
    assert setting.parameter().default is None
    assert len(setting.help) > 15
    assert setting.help.endswith(".")
    is_switch = setting.info.default is False
    assert is_switch or setting.default is not None or setting.help.startswith("Instead of `--")


@pytest.mark.parametrize("quality", PRESETS)
def test_options_that_are_not_given_are_those_of_the_preset(quality: str) -> None:
    config = conversion({"quality": quality})

    assert config == ConversionConfig(source="model", out="out", quality=quality)


def test_a_given_option_stays_beside_those_of_the_preset() -> None:
    values = {"quality": "fast", "rounding.rounds": 3, "calibration.rows": 115}

    config = conversion(values)

    assert (config.rounding.rounds, config.calibration.rows) == (3, 115)
    assert (config.rounding.sweeps, config.calibration.measure_rows) == (1, 8)


@pytest.mark.parametrize(
    ("given", "prefer"), [({}, "quality"), ({"allocate.prefer": "speed"}, "speed")]
)
def test_a_preference_reaches_conversions_and_sweeps(given: dict[str, object], prefer: str) -> None:
    one = conversion(given)
    several = sweep({"bpw": (3.0, 4.0), **given})

    conversions = (one, *several.models().values())
    assert {config.allocate.prefer for config in conversions} == {prefer}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"allocate.prefer": "size"}, r"`--prefer` is size: input should be 'quality' or 'speed'"),
        ({"head_bits": 7}, r"`--head-bits` is 7"),
        ({"out": Path("model")}, r"`--out` is the source folder"),
        (
            {"bpw": 3.0, "target_bytes": 10**9},
            r"^`--bpw` and `--target-bytes` are given; choose one",
        ),
        ({"bpw": 3.0, "fit.memory": "24GB"}, r"^`--bpw` and `--fit` are given; choose one target$"),
        # messages keep the case of what they quote
        ({"max_memory": "24XB"}, r"^`--max-memory` is 24XB: could not .*: XB$"),
        (
            {"publish.private": True, "publish.license": "mit"},
            r"^`--private`, `--license`: only .* `--publish`$",
        ),
        *(
            (
                {"publish.repo": name},
                r"^`--publish` is (.|\n)*: the Hub does not allow this name; give it as "
                r"`org/name`$",
            )
            for name in ("Model", "org/", "-org/model", "a/b/c", "me/model\n")
        ),
    ],
)
def test_what_is_wrong_or_contradictory_names_the_options(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        conversion(values)


def test_problems_name_the_options() -> None:
    with pytest.raises(ConfigError) as caught:
        conversion({"bpw": 1.0, "calibration.row_tokens": 33})

    assert set(str(caught.value).splitlines()) == {
        "`--bpw` is 1: input should be greater than or equal to 2",
        "`--row-tokens` is 33: input should be a multiple of 32",
    }


def test_problems_of_an_evaluation_name_its_own_options() -> None:
    with pytest.raises(ConfigError, match="`--rows` is 0"):
        build(ValidateOptions, {"rows": 0})


def test_a_sweep_has_the_options_of_a_conversion_but_its_targets() -> None:
    of_a_conversion = {setting.flag for setting in CONVERSION}
    of_a_sweep = {setting.flag for setting in SWEEP}

    targets = {"--bpw-total", "--target-bytes", "--fit", "--context", "--cache"}
    own = {"--runner", "--workers", "--cluster"}
    assert of_a_sweep == (of_a_conversion - targets) | own


def test_options_of_a_sweep_reach_every_conversion() -> None:
    values = {"bpw": (3.0, 4.0), "rounding.rounds": 2, "quality": "fast", "workers": 2}

    config = sweep(values)

    assert config.workers == 2
    assert [c.bpw for c in config.models().values()] == [3.0, 4.0]
    assert {c.rounding.rounds for c in config.models().values()} == {2}


def test_problems_of_a_sweep_name_its_own_options() -> None:
    values = {"bpw": (9.0,), "workers": 0, "publish.repo": "nobody"}

    with pytest.raises(ConfigError) as caught:
        sweep(values)

    problems = str(caught.value).splitlines()
    assert {line.split("`")[1] for line in problems} == {"--publish", "--bpw", "--workers"}


def test_options_of_publishing_make_one_group() -> None:
    values = {"publish.repo": "me/model-exl2", "publish.private": True, "token_block": "block"}

    config = conversion(values)

    assert config.publish == PublishOptions(repo="me/model-exl2", private=True)
    assert config.token_block == "block"


@pytest.mark.parametrize("values", [{"context": 100}, {"context": 8192}, {"cache": "q6"}])
def test_options_of_a_fit_need_the_memory(values: dict[str, object]) -> None:
    given = {f"fit.{name}": value for name, value in values.items()}

    with pytest.raises(ConfigError, match=rf"^`--{next(iter(values))}`: only .* with `--fit`$"):
        conversion({"bpw": 3.0, **given})
    with pytest.raises(ValidationError, match=r"(?m)^fit\.memory$"):
        ConversionConfig(source="model", out="out", fit=values)


def test_a_fit_replaces_other_targets() -> None:
    assert conversion({"fit.memory": "24GB"}).bpw is None


def test_a_group_that_may_be_missing_says_what_its_options_go_with() -> None:
    found = {setting.field: setting for setting in CONVERSION}

    assert found["publish.repo"].default == "nowhere"
    assert found["publish.private"].help.startswith("With `--publish`: keep ")
    assert found["fit.context"].help.startswith("With `--fit`: tokens ")


def test_an_option_of_a_group_has_its_own_name_where_the_group_is_the_command() -> None:
    alone = {setting.field: setting for setting in settings_of(PublishConfig)}

    assert alone["repo"].flag == "--repo"
    assert alone["private"].help == "Keep the repository private after verification."
    assert {"--text", "--rows"} <= {setting.flag for setting in EVALUATION}
    assert not any(setting.field.startswith("sample_") for setting in EVALUATION)


def test_help_names_options_where_a_description_names_fields() -> None:
    found = {setting.field: setting for setting in CONVERSION}

    assert found["bpw_total"].help.startswith("Instead of `--bpw`: ")
    assert found["head_bits"].default == "6 with `--bpw`, else chosen"
    assert found["calibration.text"].help.startswith("auto: ")


def test_options_of_lists_may_be_repeated() -> None:
    repeated = {s.field for s in settings_of(GenerationOptions) if "may be repeated" in s.help}

    assert repeated == {"stop", "ban", "lora"}
