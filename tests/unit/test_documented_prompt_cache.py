"""The program on the page about kept prompts runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "keep-prompts.md"


def test_the_program_keeps_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo-exl2").symlink_to(ROOT / "demo" / "model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}

    [program] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(program, names)
    prompt = "Once upon a time " * 200

    assert names["cached"](prompt) == 0
    assert names["cached"](prompt) >= 512
