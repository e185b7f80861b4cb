"""The configurations of a measurement and of a refinement: only what has an effect."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from exl2flow.core.options.config import PRESETS, ConversionConfig, RunOptions, SharedOptions
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.refine import RefinementConfig

WITHOUT_EFFECT = ("bpw", "head_bits", "measurement", "publish", "shard_size_mb", "tune", "allocate")


@pytest.mark.parametrize("field", [*WITHOUT_EFFECT, "validate_options"])
def test_a_measurement_refuses_what_would_have_no_effect(field: str) -> None:
    with pytest.raises(ValidationError, match=rf"(?m)^{field}$"):
        MeasureConfig.model_validate({"source": "model", "out": "m.json", field: None} | {field: 4})


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_a_refinement_refuses_what_would_have_no_effect(field: str) -> None:
    given = {"source": "source", "model": "model", "out": "out", field: 4}

    with pytest.raises(ValidationError, match=rf"(?m)^{field}$"):
        RefinementConfig.model_validate(given)


@pytest.mark.parametrize("quality", PRESETS)
def test_presets_fill_what_the_configuration_has(quality: str) -> None:
    conversion = ConversionConfig(source="source", out="out", quality=quality)
    refinement = RefinementConfig(source="source", model="model", out="out", quality=quality)
    measurement = MeasureConfig(source="source", out="m.json", quality=quality)

    for name in ("calibration", "rope", "sensitivity", "rounding"):
        assert getattr(refinement, name) == getattr(measurement, name) == getattr(conversion, name)


def test_a_measurement_is_the_beginning_of_a_conversion_in_the_same_work_root() -> None:
    config = MeasureConfig(
        source="source", out=Path("there/m.json"), quality="fast", calibration={"rows": 7}
    )

    conversion = config.conversion()

    for name in set(RunOptions.model_fields) - {"out", "work_root"}:
        assert getattr(conversion, name) == getattr(config, name)
    assert conversion.work_dir_root == config.work_dir_root == Path("there/.exl2flow").resolve()


def test_forms_begin_with_what_a_person_decides() -> None:
    properties = list(ConversionConfig.model_json_schema()["properties"])

    assert properties[:3] == ["source", "out", "quality"]
    assert properties[3:8] == ["bpw", "bpw_total", "target_bytes", "fit", "head_bits"]
    assert list(RefinementConfig.model_json_schema()["properties"])[:3] == [
        "model",
        "source",
        "out",
    ]
    assert set(properties) == set(ConversionConfig.model_fields) > set(SharedOptions.model_fields)
