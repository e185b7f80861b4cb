"""The table of models is the table of families."""

import re
from pathlib import Path

from exl2flow.model import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
ROW = re.compile(r"^\| `(\w+)` \| (?:`(\w+)`)? *\|", re.MULTILINE)


def test_documented_models_are_the_families() -> None:
    listed = [(name, kind or None) for name, kind in ROW.findall(PAGE.read_text(encoding="utf-8"))]

    assert len(listed) == len(set(listed))
    assert set(listed) == set(FAMILIES)
