"""A record states no option that another run with the same files may not have had."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conversions import small_config
from pydantic import BaseModel
from stage_runs import text_parquet
from tiny import make_tiny

from exl2flow.core.errors import Exl2FlowError
from exl2flow.core.options.config import PRESETS, ConversionConfig
from exl2flow.core.store.stage import Pipeline
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.compile.recorded_options import name_of_preset, recorded_conversion

TEXTS = ("log", "speed", "layer", "fast", "best", "error", "fisher", "self")  # choices of options


PLACES = ("out", "work_root", "source")


def leaves(options: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the names of all options but places, with their groups' before them."""
    for name in type(options).model_fields:
        value = getattr(options, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, (*path, name))
        elif name not in PLACES:
            yield (*path, name)


def others(value: object, copy: Path) -> Iterator[object]:
    """Yield values for an option that has this one."""
    match value:
        case bool():
            yield not value
        case int() | float():
            yield 2 * value or 1
        case str():
            yield from TEXTS
            yield copy
        case _:
            yield from (3, 96, copy)


def variants(config: ConversionConfig, copy: Path) -> Iterator[ConversionConfig]:
    """Yield configurations that differ in one option, except for places."""
    given = config.model_dump()
    for *groups, name in leaves(config):
        inner = given
        for group in groups:
            inner = inner[group]
        before = inner[name]
        for value in others(before, copy):
            inner[name] = value
            with suppress(ValueError):
                yield ConversionConfig.model_validate(given)
        inner[name] = before


BASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "error": {"sensitivity": {"kind": "error"}, "bpw": None, "bpw_total": 6.0},
    "self": {"tune": {"steps": 2}, "text": "self"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("recorded") / "model", num_hidden_layers=1)


@pytest.mark.parametrize("base", BASES)
def test_equal_fingerprints_have_equal_records(base: str, source: Path) -> None:
    text = text_parquet(source.parent / "text.parquet")
    copy = Path(shutil.copy(text, source.parent / "copy.parquet"))
    values = dict(BASES[base])
    values["calibration"] = {"text": values.pop("text", text), "rows": 2, "row_tokens": 32}
    config = small_config(source, source.parent / "out", **values)

    found: dict[str, dict[str, Any]] = {}
    count = 0
    for other in (config, *variants(config, copy)):
        try:
            pipeline = Pipeline(other, STAGES, device="cpu")
        except (Exl2FlowError, OSError):  # it is missing, or not a measurement
            continue
        count += 1
        record = recorded_conversion(other)
        assert found.setdefault(pipeline.refs["compile"].fingerprint, record) == record
    assert len(found) < count - 10  # many have no effect on the files
    assert len(found) >= 30


@pytest.mark.parametrize("quality", PRESETS)
def test_presets_have_the_fingerprints_of_their_values(quality: str) -> None:
    config = ConversionConfig.model_validate({"source": "m", "out": "o", "quality": quality})
    fewer = {"quality": quality, "calibration": {"rows": 4}}

    assert name_of_preset(config) == {}
    assert name_of_preset(small_config(Path("m"), Path("o"), **fewer)) == {}


def test_preset_with_the_values_of_another_is_told_apart() -> None:
    config = ConversionConfig.model_validate({"source": "m", "out": "o"})

    other = ConversionConfig.model_validate({**config.model_dump(), "quality": "fast"})

    assert name_of_preset(other) == {"quality": "fast"}
