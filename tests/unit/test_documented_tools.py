"""The programs on the page about functions run, and the page names every format."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tool_calls import template_of

from exl2flow.engine.chat import all_tool_formats, named_tool_format

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "call-functions.md"
TEXT = PAGE.read_text(encoding="utf-8")


def programs() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    for program in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(program, names)
    return names


def test_model_calls_the_function(tmp_path: Path) -> None:
    folder = shutil.copytree(PAGE.parents[2] / "demo" / "model", tmp_path / "model")
    template = template_of("hermes") + "{{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(template)

    parsed = programs()["called"](folder, "How is the weather?")

    [call] = parsed.calls
    assert call.name == "get_weather"
    assert set(json.loads(call.arguments)) == {"city"}
    assert (parsed.content, parsed.is_broken) == ("", False)


def test_events_are_shown() -> None:
    text = 'Yes. <tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call>'

    shown = list(programs()["shown"](named_tool_format("hermes"), [text]))

    assert shown == [
        "text 'Yes. '",
        "get_weather begins",
        'arguments {"city": "Bonn"}',
        "call ends",
    ]


def test_every_format_is_named() -> None:
    table = TEXT.partition("## Formats")[2].partition("A template that")[0]
    rows = {
        name: kind
        for kind, names in re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", table, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", names)
    }

    assert rows == {name: row.kind for name, row in all_tool_formats().items()}
