"""The programs for event loops and hooks on the page about generation run as they stand there."""

import asyncio
import re
from pathlib import Path
from typing import Any

from exl2flow.inference import load_model

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "generation.md"
DEMO = ROOT / "demo" / "model"


def programs_with(name: str) -> dict[str, Any]:
    """Return the names of the program on the page that defines a function."""
    names: dict[str, Any] = {"__name__": "page"}
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [program] = [text for text in programs if f"def {name}(" in text]
    exec(program, names)
    return names


def test_tasks_of_an_event_loop_share_a_generator() -> None:
    texts = asyncio.run(programs_with("answers")["answers"](str(DEMO), ["Once", "A haiku:"]))

    assert len(texts) == 2
    assert all(texts)


def test_a_hook_replaces_tokens() -> None:
    text = programs_with("shouted")["shouted"](load_model(DEMO, device="cpu"), "Once upon a time")

    assert "!" in text
    assert "." not in text
