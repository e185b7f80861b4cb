"""The program on the page about conversations runs, and the page names every format."""

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

from exl2flow.core.requests.conversation import PromptFormat
from exl2flow.engine.chat import all_formats

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "converse-in-python.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_program_runs() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for program in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(program, names)

    session = names["talk"](PAGE.parents[2] / "demo" / "model", "Hello", "Why?")

    assert [turn.user for turn in session.turns] == ["Hello", "Why?"]
    assert all(turn.answer for turn in session.turns)


def test_template_gets_what_the_program_gives(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[1], names)
    shutil.copy(PAGE.parents[2] / "demo" / "model" / "tokenizer.json", tmp_path)
    template = (
        "{{ tools[0].function.name }} {{ messages[1].tool_calls[0].function.arguments.city }}"
    )
    (tmp_path / "chat_template.jinja").write_text(template + "{{ messages[2].content }}")

    assert names["asked"](tmp_path) == "weather Bonnsunny"


def test_every_format_is_named() -> None:
    table = TEXT.partition("## Prompt formats")[2].partition("Without a template")[0]

    assert set(re.findall(r"`([\w-]+)`", table)) - {"own", "names"} == set(all_formats())


def test_the_row_has_fields_that_there_are() -> None:
    (row,) = tomllib.loads(re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)[0]).values()

    assert set(row) <= set(PromptFormat.__dataclass_fields__)
