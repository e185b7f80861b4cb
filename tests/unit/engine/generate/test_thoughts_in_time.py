"""Generated thoughts end at their budget, also with drafts, bans and in company."""

import re
from pathlib import Path

import pytest

from exl2flow.core.requests.conversation import Thinking
from exl2flow.engine.drafts import Drafter, NgramDraft
from exl2flow.engine.filters import GrammarFilter, Phases
from exl2flow.inference import Event, Generator, LoadedModel, Request, SamplingSettings, load_model

DEMO = Path(__file__).parents[4] / "demo" / "model"
MARKS = Thinking("<<", ">>")
WORD = GrammarFilter(regex="[a-f]{2,6}!")
HOT = SamplingSettings(temperature=1.3, top_k=0, top_p=0.0)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(DEMO, device="cpu", max_tokens=512)


def texts_of(model: LoadedModel, *requests: Request, draft: Drafter | None = None) -> list[str]:
    generator, texts = Generator(model, tokens=4096, slots=4, draft=draft), list[str]()
    events: list[list[Event]] = [[] for _ in requests]
    for each, seen in zip(requests, events, strict=True):
        generator.submit(each, deliver=seen.append)
    while not generator.is_idle:
        generator.step()
    for seen in events:
        assert seen[-1].error is None
        texts.append("".join(event.text for event in seen))
    return texts


def thinking(budget: int, seed: int, *, bans: tuple[str, ...] = ()) -> Request:
    phases = Phases(MARKS, True, budget, " Enough.", WORD)
    options = {"filters": [phases], "max_new_tokens": 80, "banned_strings": bans}
    return Request("a cat and a cat and a cat and", seed=seed, settings=HOT, **options)


@pytest.mark.parametrize("bans", [(), ("at", "b")])
def test_thoughts_end_at_their_budget(model: LoadedModel, bans: tuple[str, ...]) -> None:
    wanted = [thinking(budget, seed, bans=bans) for seed, budget in enumerate((0, 1, 7, 20, 30))]

    found = texts_of(model, *wanted)

    assert found == texts_of(model, *wanted, draft=NgramDraft())
    assert found == [texts_of(model, each)[0] for each in wanted]
    for text, each in zip(found, wanted, strict=True):
        thoughts, mark, answer = text.partition(" Enough.>>")
        assert mark
        assert re.fullmatch("[a-f]{2,6}!", answer)
        assert not any(ban in text for ban in bans)
        phases = each.filters[0]
        assert isinstance(phases, Phases)
        assert len(model.tokenizer.encode(thoughts)) <= phases.budget + 1
