"""The programs on the page for users of exllamav2 run as they stand there, and agree."""

import re
import sys
from pathlib import Path
from typing import Any

from exl2flow.compat.exllamav2.generator import ExLlamaV2Filter

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "coming-from-exllamav2.md"


def test_both_interfaces_give_the_same_texts() -> None:
    names: dict[str, Any] = {}
    before = {*sys.modules}
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(program, names)
    for name in {*sys.modules} - before:
        if name.partition(".")[0] == "exllamav2":
            del sys.modules[name]
    folder = str(ROOT / "demo" / "model")

    texts = names["theirs"](folder)

    assert all(texts)
    assert texts == names["ours"](folder)
    assert names["their_loop"](folder) == names["our_loop"](folder)
    assert names["ExLlamaV2Filter"] is ExLlamaV2Filter
