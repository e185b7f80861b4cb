"""The programs on the page about filters run as they stand there."""

import re
from pathlib import Path
from typing import Any

from constrained import walk
from spelled import spelled

from exl2flow.engine.filters import Combined
from exl2flow.model import Tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "constrain-texts.md"
DEMO = PAGE.parents[2] / "demo" / "model"


def test_programs_run() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(program, names)

    tokenizer, _ = spelled("yesnot ")
    for seed in range(5):
        short = walk(Combined([names["Short"](3)], tokenizer, 40), tokenizer, seed=seed)
        assert short is not None
        assert len(short) <= 3
        verdict = walk(Combined([names["verdict"]], tokenizer, 40), tokenizer, seed=seed)
        assert verdict is not None
        assert "".join(tokenizer.pieces[i] for i in verdict) in ("yes", "no", "not yet")
    assert names["in_time"].then == names["answer"]
    Combined([names["in_time"]], Tokenizer.load(DEMO), 4128)
    for answer in names["answers"](DEMO):
        assert answer in ("yes", "no", "not yet")
