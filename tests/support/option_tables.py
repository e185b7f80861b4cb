"""Write the tables of options and of fields in the reference, from commands and models.

A table stands between `<!-- options: COMMAND -->` or `<!-- fields: MODEL -->` and `<!-- end -->`.
Behind `without` are a command or a model whose rows are left out; everything else is by hand.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import annotated_types
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from exl2flow.cli.main import app
from exl2flow.cli.options import settings_of
from exl2flow.cli.options.setting import EMPTY, group_of
from exl2flow.core.options.config import ConversionConfig, in_form_order
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.options.sweep import SweepConfig

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGES = (REFERENCE / "cli.md", REFERENCE / "configuration.md")
TABLE = re.compile(
    r"(<!-- (options|fields): (\w+)(?: without (\w+))? -->\n).*?(?=<!-- end -->)", re.DOTALL
)
MODELS: dict[str, type[BaseModel]] = {
    model.__name__: model
    for model in (ConversionConfig, MeasureConfig, PublishConfig, RefinementConfig, SweepConfig)
}
HELP = ("--help", "--help-all")
SIGNS = {
    annotated_types.Ge: ("≥", "ge"),
    annotated_types.Gt: (">", "gt"),
    annotated_types.Le: ("≤", "le"),
    annotated_types.MultipleOf: ("multiple of", "multiple_of"),
}

Row = tuple[str, ...]


def option_rows(command: str) -> dict[str, list[Row]]:
    """Return panel → rows of a command's options, in the order of its help."""
    panels: dict[str, list[Row]] = {"": []}
    for each in typer.main.get_command(app).commands[command].params:  # type: ignore[attr-defined]  # a group
        if not each.opts[0].startswith("--") or each.opts[0] in HELP:
            continue
        names = ", ".join(f"`{name}`" for name in (*each.opts, *each.secondary_opts))
        if not each.is_flag:
            names = f"`{each.opts[0]} {each.metavar or each.name.upper()}`"
        shown = each.show_default if isinstance(each.show_default, str) else ""
        if each.required:
            shown = "required"
        elif each.is_flag:
            shown = "on" if each.secondary_opts else "off"
        elif each.show_default is True and each.default is not None:
            shown = str(each.default)
        panel = each.rich_help_panel or ""
        panels.setdefault("" if panel == "Options" else panel, []).append((names, shown, each.help))
    return panels


def options(command: str, without: str | None) -> Iterator[Row]:
    """Yield the rows of a command's table; those of another command are left out."""
    known = {row for rows in option_rows(without).values() for row in rows} if without else set()
    yield "option", "default", "meaning"
    for panel, rows in option_rows(command).items():
        own = [row for row in rows if row not in known]
        if own and panel:
            yield f"**{panel}**", "", ""
        yield from own


def bounds(field: FieldInfo) -> str:
    """Return the values that a field takes."""
    kinds = (field.annotation, *get_args(field.annotation))
    choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
    limits = [each for each in field.metadata if type(each) in SIGNS]
    words = [f"{SIGNS[type(each)][0]} {getattr(each, SIGNS[type(each)][1])}" for each in limits]
    return ", ".join([*words, *(f"`{choice}`" for choice in choices)])


def default(field: FieldInfo) -> str:
    """Return a field's default, in words where the description has them."""
    words = (field.description or "").partition(EMPTY)[2]
    if field.is_required():
        return "required"
    if field.default is None:
        return f"empty: {words}" if words else "empty"
    return f"`{field.default}`"


def field_rows(model: type[BaseModel], flags: dict[str, str], group: str = "") -> Iterator[Row]:
    """Yield a row for each field of a model and of its groups."""
    for name in in_form_order(model.model_fields):
        field, path = model.model_fields[name], group + name
        inner = group_of(field)
        if inner is None or field.default is None:
            text = (field.description or "").partition(EMPTY)[0]
            limits = "a group" if inner else bounds(field)
            flag = f"`{flags[path]}`" if path in flags else ""
            yield f"`{path}`", default(field), limits, flag, text
        if inner is not None:
            yield from field_rows(inner, flags, f"{path}.")


def fields(name: str, without: str | None) -> Iterator[Row]:
    """Yield the rows of a model's table; those of another model are left out."""

    def rows(name: str) -> list[Row]:
        flags = {setting.field: setting.flag for setting in settings_of(MODELS[name])}
        return [*field_rows(MODELS[name], flags)]

    known = rows(without) if without else []
    yield "field", "default", "values", "option", "meaning"
    yield from (row for row in rows(name) if row not in known)


def written(page: str) -> str:
    """Return a page with its tables as they are now."""

    def table(match: re.Match[str]) -> str:
        head, kind, name, without = match.groups()
        title, *rows = options(name, without) if kind == "options" else fields(name, without)
        lines = [title, ("---",) * len(title), *rows]
        cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
        text = "".join(f"| {' | '.join(line)} |\n" for line in cells)
        return head + text.replace("  |", " |")

    return TABLE.sub(table, page)


def main() -> None:
    """Write the pages."""
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
