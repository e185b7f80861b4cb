"""The tables of fields and presets in the reference are those of the code."""

import re
from pathlib import Path

import pytest

from exl2flow.core.options.config import PRESETS, ConversionConfig

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"
NO_DEFAULT = ("empty", "required", "none")  # how cells begin that state no value


def table(first: str) -> list[list[str]]:
    """Return the cells of a table's rows, code marks removed; `first` begins its header."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"| {first} ")
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    return [
        [cell.strip().replace("`", "") for cell in line.strip("| ").split("|")] for line in lines
    ]


def value_of(config: ConversionConfig, field: str) -> object:
    """Return a field by its dotted name."""
    found: object = config
    for name in field.split("."):
        found = getattr(found, name)
    return found


def said(cell: str) -> str:
    """Return a cell without its explanation."""
    return re.split(r"[:;]", cell)[0]


def config_of(quality: str) -> ConversionConfig:
    return ConversionConfig(source="a", out="b", quality=quality)


@pytest.mark.parametrize("row", table("field | `fast`"), ids=lambda row: row[0])
def test_preset_sets_what_the_reference_says(row: list[str]) -> None:
    field, *cells = row
    assert len(cells) <= len(PRESETS)
    for quality, cell in zip(PRESETS, cells, strict=False):
        if cell:
            assert str(value_of(config_of(quality), field)) in (cell, f"{cell}.0")


def test_reference_names_every_field_that_a_preset_sets() -> None:
    documented = {row[0] for row in table("field | `fast`")}

    set_by_one = {f"{g}.{k}" for preset in PRESETS.values() for g, v in preset.items() for k in v}

    assert set_by_one <= documented


@pytest.mark.parametrize(
    "row", [row for row in table("field | default") if "." in row[0]], ids=lambda row: row[0]
)
def test_default_is_what_the_reference_says(row: list[str]) -> None:
    field, cell, *_ = row
    if not cell.startswith(NO_DEFAULT):
        groups = {"fit": {"memory": "24GB"}, "publish": {"repo": "org/name"}}
        config = ConversionConfig(source="a", out="b", **groups)
        assert str(value_of(config, field)) in (said(cell), f"{said(cell)}.0")
