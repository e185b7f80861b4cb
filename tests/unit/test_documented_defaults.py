"""The defaults in the reference of the command line are those of the code."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from exl2flow.core.options.chat import ChatOptions
from exl2flow.core.options.generation import GenerationOptions
from exl2flow.flows.cli.options.sampling import SAMPLING
from exl2flow.flows.cli.options.table import CONVERSION, EVALUATION

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
ROW = re.compile(r"\| `(--[a-z0-9-]+)[^`]*` \| ([^|]*) \|")
LITERAL = re.compile(r"-?\d+(\.\d+)?|on|off")
VALUES = {"on": True, "off": False}


def documented() -> dict[tuple[str, str], str]:
    """Return (command, option) → default of all options whose default is a number or a switch."""
    found, command = {}, ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        command = line[3:] if line.startswith("## ") else command
        match = ROW.match(line)
        if match and LITERAL.fullmatch(match[2]):
            found[command, match[1]] = match[2]
    return found


def defaults() -> Iterator[tuple[str, str, object]]:
    """Yield (command, option, default) of the fields that options set."""
    settings = [("convert", s) for _, panel in CONVERSION for s in panel]
    settings += [("validate", s) for s in EVALUATION[1]]
    settings += [("generate", s) for s in SAMPLING[1]]
    for command, setting in settings:
        stated = setting.default or ""  # where the field's is empty
        is_number = LITERAL.fullmatch(stated) and stated not in VALUES
        yield command, setting.flag, float(stated) if is_number else setting.field_info().default
    for command, model in (("chat", ChatOptions), ("generate", GenerationOptions)):
        for name, field in model.model_fields.items():
            yield command, f"--{name.replace('_', '-')}", field.default


DOCUMENTED = documented()
CASES = [(*case[:2], case[2]) for case in defaults() if case[:2] in DOCUMENTED]


def test_most_defaults_are_documented() -> None:
    assert len(CASES) >= 70


@pytest.mark.parametrize(("command", "option", "default"), CASES, ids=str)
def test_documented_default_is_the_one_of_the_code(
    command: str, option: str, default: object
) -> None:
    text = DOCUMENTED[command, option]

    value = VALUES[text] if text in VALUES else float(text)
    if value is False and default is None:
        return  # `off` also describes what is not given
    assert default == value
    assert isinstance(default, bool) == isinstance(value, bool)


def test_names_of_a_chat_are_documented() -> None:
    text = PAGE.read_text(encoding="utf-8")

    options = ChatOptions()
    assert f"| {options.user_name} |" in text
    assert f"| {options.bot_name} |" in text
    assert f"| {options.thinking} |" in text
