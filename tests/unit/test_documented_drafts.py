"""The program on the page about drafts runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "draft-tokens.md"


def test_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo-exl2").symlink_to(ROOT / "demo" / "model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}

    [program] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(program, names)
    (ngrams, _), (model, per_step), (both, _) = map(names["accepted"], names["drafts"])

    assert {*ngrams} <= {"ngram"}
    assert {*both} <= {"ngram", "model"}
    drafted, accepted = model["model"]
    assert drafted >= accepted > 0
    assert per_step > 1
