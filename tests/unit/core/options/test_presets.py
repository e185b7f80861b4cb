"""Presets fill what is not given, and nothing else, however the configuration arrives."""

from collections.abc import Iterator

import pytest

from exl2flow.core.options.config import PRESETS, ConversionConfig, Options, RoundingOptions

DIFFERENT: dict[type, object] = {bool: True, int: 7, float: 0.7}


def entries() -> Iterator[tuple[str, str, str]]:
    """Yield (preset, group, option) of all that presets set."""
    for quality, groups in PRESETS.items():
        for group, options in groups.items():
            yield from ((quality, group, option) for option in options)


def found(config: ConversionConfig, groups: object) -> dict[str, dict[str, object]]:
    """Return the values that a configuration has for the options of a preset."""
    assert isinstance(groups, dict)
    return {
        group: {option: getattr(getattr(config, group), option) for option in options}
        for group, options in groups.items()
    }


def another(group: str, option: str, preset: object) -> object:
    """Return a valid value of an option that is not the preset's: the default, or another."""
    default: object = getattr(ConversionConfig.model_fields[group].default, option)
    return default if default != preset else DIFFERENT[type(default)]


@pytest.mark.parametrize("quality", PRESETS)
def test_a_preset_sets_its_options_and_no_others(quality: str) -> None:
    config = ConversionConfig(source="model", out="out", quality=quality)

    assert found(config, PRESETS[quality]) == PRESETS[quality]
    standard = ConversionConfig(source="model", out="out").model_dump()
    for group, options in PRESETS[quality].items():
        standard[group] |= options
    assert config.model_dump() == standard | {"quality": quality}


def test_standard_is_the_defaults() -> None:
    defaults = {
        name: field.default.model_dump()
        for name, field in ConversionConfig.model_fields.items()
        if isinstance(field.default, Options)
    }

    config = ConversionConfig(source="model", out="out", quality="standard")

    assert config.model_dump(include=set(defaults)) == defaults
    assert config == ConversionConfig(source="model", out="out")


@pytest.mark.parametrize(("quality", "group", "option"), list(entries()))
def test_a_given_option_stays_beside_those_of_the_preset(
    quality: str, group: str, option: str
) -> None:
    preset = PRESETS[quality]
    value = another(group, option, preset[group][option])

    config = ConversionConfig(
        source="model", out="out", quality=quality, **{group: {option: value}}
    )

    expected = {name: dict(options) for name, options in preset.items()}
    expected[group][option] = value
    assert found(config, preset) == expected


def test_options_given_as_an_object_count_as_far_as_they_were_set() -> None:
    given = RoundingOptions(damping=0.2, rounds=3)  # 3 is also the default

    config = ConversionConfig(source="model", out="out", quality="exllamav2", rounding=given)

    assert (config.rounding.damping, config.rounding.rounds) == (0.2, 3)
    assert config.rounding.scale_search == "grid"


def test_nothing_given_in_words_is_nothing_given() -> None:
    empty = {"quality": "fast", "bpw": None, "head_bits": None, "rounding": {"rounds": None}}

    config = ConversionConfig(source="model", out="out", sensitivity=None, **empty)

    assert config == ConversionConfig(source="model", out="out", quality="fast")


@pytest.mark.parametrize("quality", PRESETS)
@pytest.mark.parametrize("target", [{"bpw": 2.5}, {"bpw_total": 3.5}, {"target_bytes": 10**9}])
def test_json_keeps_what_was_given_and_what_was_filled(
    quality: str, target: dict[str, object]
) -> None:
    given = {"rounding": {"rounds": 5}, "calibration": {"rows": 115}, **target}
    config = ConversionConfig(source="model", out="out", quality=quality, **given)

    again = ConversionConfig.model_validate_json(config.model_dump_json())

    assert again == config
    assert (again.rounding.rounds, again.calibration.rows) == (5, 115)


def test_another_preset_takes_nothing_from_a_stored_configuration() -> None:
    """A stored configuration holds every option, so only its name changes."""
    config = ConversionConfig(source="model", out="out", quality="exllamav2")

    stored = {**config.model_dump(mode="json"), "quality": "best"}

    assert ConversionConfig(**stored).rounding == config.rounding
