"""The program on the page about adapters runs as it stands there."""

import re
from pathlib import Path
from typing import Any

from adapters import make_adapter

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "adapters.md"


def test_program_runs(tmp_path: Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(program, names)
    model = ROOT / "demo" / "model"

    adapted, plain = names["both"](model, make_adapter(tmp_path / "a", model))

    assert adapted
    assert adapted != plain
