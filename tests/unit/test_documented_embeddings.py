"""The programs on the page about embeddings run as they stand there, and agree."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from exl2flow.inference import Generator, SamplingSettings, load_model

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "embeddings.md"


def test_programs_run() -> None:
    names: dict[str, Any] = {}
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(program, names)
    model = load_model(ROOT / "demo" / "model", device="cpu", max_tokens=256)
    generator = Generator(model, tokens=512, slots=2)
    picture = torch.randn(9, model.spec.hidden_size)

    texts = [
        "".join(e.text for e in generator.stream(replace(r, settings=SamplingSettings.greedy())))
        for r in (names["question"](picture), names["question_of_ids"](picture, model.tokenizer))
    ]

    assert texts[0]
    assert texts[0] == texts[1]
