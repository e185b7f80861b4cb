from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.config import PRESETS, ConversionConfig, RoundingOptions, TuneOptions
from exl2flow.core.options.publication import PublishOptions
from exl2flow.flows.cli.options import Setting, build, build_sweep, build_validation
from exl2flow.flows.cli.options.setting import group_of
from exl2flow.flows.cli.options.table import CONVERSION, EVALUATION, SWEEP

SETTINGS = [setting for _, members in (*CONVERSION, EVALUATION) for setting in members]
GIVEN_OTHERWISE = {"source", "out"}  # the argument and the required option
GIVEN_OTHERWISE |= {"clean_after"}  # the command `clean`; it is meant for servers


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
    "rounding.rounds"
}
IN_PYTHON_ONLY |= {"sensitivity.block", "sensitivity.seed", "allocate.rounds"}
IN_PYTHON_ONLY |= {"publish.sample_tokens", "publish.token_block"}  # the latter: `--token-block`


def test_every_field_of_the_configuration_has_an_option() -> None:
    fields = {setting.field for _, members in CONVERSION for setting in members}

    assert fields == set(leaves(ConversionConfig)) - GIVEN_OTHERWISE - IN_PYTHON_ONLY


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.flag)
def test_an_option_is_not_given_by_default_and_says_what_it_means(setting: Setting) -> None:
    assert setting.parameter("panel").default is None
    assert len(setting.help) > 15
    assert setting.help.endswith(".")


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.flag)
def test_an_option_states_its_default_or_which_option_it_replaces(
    setting: Setting,
) -> None:
    default = setting.default or setting.field_info().default

    assert default is not None or setting.help.startswith("Instead of `--")


@pytest.mark.parametrize("quality", PRESETS)
def test_options_that_are_not_given_are_those_of_the_preset(quality: str) -> None:
    config = build(Path("model"), Path("out"), {"quality": quality})

    assert config == ConversionConfig(source="model", out="out", quality=quality)


def test_a_given_option_stays_beside_those_of_the_preset() -> None:
    values = {"quality": "fast", "rounding.rounds": 3, "calibration.rows": 115}

    config = build(Path("model"), Path("out"), values)

    assert (config.rounding.rounds, config.calibration.rows) == (3, 115)
    assert (config.rounding.sweeps, config.calibration.measure_rows) == (1, 8)


def test_values_reach_the_groups_of_the_configuration() -> None:
    config = build(
        Path("model"), Path("out"), {"bpw": 3.5, "calibration.rows": 7, "allocate.power": 1.5}
    )

    assert (config.bpw, config.calibration.rows, config.allocate.power) == (3.5, 7, 1.5)


@pytest.mark.parametrize(
    ("given", "prefer"), [({}, "quality"), ({"allocate.prefer": "speed"}, "speed")]
)
def test_a_preference_reaches_conversions_and_sweeps(given: dict[str, object], prefer: str) -> None:
    one = build(Path("model"), Path("out"), given)
    sweep = build_sweep(Path("model"), Path("out"), {"bpw": (3.0, 4.0), **given})

    conversions = (one, *sweep.conversions().values())
    assert {config.allocate.prefer for config in conversions} == {prefer}


def test_an_unknown_preference_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="`--prefer` is size: input should be 'quality' or 'spee"):
        build(Path("model"), Path("out"), {"allocate.prefer": "size"})
    with pytest.raises(ConfigError, match="`--prefer` is size"):
        build_sweep(Path("model"), Path("out"), {"bpw": (3.0,), "allocate.prefer": "size"})


def test_problems_name_the_options() -> None:
    with pytest.raises(ConfigError) as caught:
        build(Path("model"), Path("out"), {"bpw": 1.0, "calibration.row_tokens": 33})

    assert set(str(caught.value).splitlines()) == {
        "`--bpw` is 1.0: input should be greater than or equal to 2",
        "`--row-tokens` is 33: input should be a multiple of 32",
    }


def test_contradictions_name_the_option() -> None:
    with pytest.raises(ConfigError, match="`--head-bits` is 7"):
        build(Path("model"), Path("out"), {"head_bits": 7})
    with pytest.raises(ConfigError, match="`--out` is the source folder"):
        build(Path("model"), Path("model"), {})
    with pytest.raises(ConfigError, match=r"^`--bpw` and `--target-bytes` are given; choose one"):
        build(Path("model"), Path("out"), {"bpw": 3.0, "target_bytes": 10**9})


def test_problems_of_an_evaluation_name_its_own_options() -> None:
    with pytest.raises(ConfigError, match="`--rows` is 0"):
        build_validation({"validate_options.rows": 0, "device": "cpu"})


def test_a_sweep_has_the_options_of_a_conversion_but_its_targets() -> None:
    of_a_conversion = {setting.flag for _, members in CONVERSION for setting in members}
    of_a_sweep = {setting.flag for _, members in SWEEP for setting in members}

    targets = {"--bpw", "--bpw-total", "--target-bytes", "--fit", "--context", "--cache"}
    assert of_a_sweep == of_a_conversion - targets


def test_options_of_a_sweep_reach_every_conversion() -> None:
    values = {"bpw": (3.0, 4.0), "rounding.rounds": 2, "quality": "fast", "workers": 2}

    config = build_sweep(Path("model"), Path("out"), values)

    assert config.workers == 2
    assert [c.bpw for c in config.conversions().values()] == [3.0, 4.0]
    assert {c.rounding.rounds for c in config.conversions().values()} == {2}


def test_problems_of_a_sweep_name_its_own_options() -> None:
    values = {"bpw": (9.0,), "workers": 0, "publish.repo": "nobody"}

    with pytest.raises(ConfigError) as caught:
        build_sweep(Path("model"), Path("out"), values)

    problems = str(caught.value).splitlines()
    assert {line.split("`")[1] for line in problems} == {"--publish", "--bpw", "--workers"}


def test_options_of_publishing_make_one_group() -> None:
    values = {"publish.repo": "me/model-exl2", "publish.private": True, "token_block": "block"}

    config = build(Path("model"), Path("out"), values)

    assert config.publish == PublishOptions(repo="me/model-exl2", private=True)
    assert config.token_block == "block"


@pytest.mark.parametrize("name", ["Model", "org/", "-org/model", "a/b/c", "me/model\n"])
def test_a_repository_is_asked_for_as_organization_and_name(name: str) -> None:
    reason = "the Hub does not allow this name; give it as `org/name`"
    with pytest.raises(ConfigError, match=rf"^`--publish` is (.|\n)*: {reason}$"):
        build(Path("model"), Path("out"), {"publish.repo": name})


def test_messages_keep_the_case_of_what_they_quote() -> None:
    with pytest.raises(ConfigError, match=r"^`--max-memory` is 24XB: could not .*: XB$"):
        build(Path("model"), Path("out"), {"max_memory": "24XB"})


def test_options_of_publishing_need_a_repository() -> None:
    values = {"publish.private": True, "publish.license": "mit"}

    with pytest.raises(ConfigError, match=r"^`--private`, `--license`: only .* `--publish`$"):
        build(Path("model"), Path("out"), values)


@pytest.mark.parametrize("values", [{"context": 100}, {"context": 8192}, {"cache": "q6"}])
def test_options_of_a_fit_need_the_memory(values: dict[str, object]) -> None:
    given = {f"fit.{name}": value for name, value in values.items()}

    with pytest.raises(ConfigError, match=rf"^`--{next(iter(values))}`: only .* with `--fit`$"):
        build(Path("model"), Path("out"), {"bpw": 3.0, **given})
    with pytest.raises(ValidationError, match=r"(?m)^fit\.memory$"):
        ConversionConfig(source="model", out="out", fit=values)


def test_a_fit_replaces_other_targets() -> None:
    assert build(Path("model"), Path("out"), {"fit.memory": "24GB"}).bpw is None
    with pytest.raises(ConfigError, match=r"^`--bpw` and `--fit` are given; choose one target$"):
        build(Path("model"), Path("out"), {"bpw": 3.0, "fit.memory": "24GB"})
