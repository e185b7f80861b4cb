"""Drafts on a GPU: recorded and launched steps agree, and texts are those without guesses."""

import pytest
import torch
from gpu_texts import assert_alike, run
from texts import ids_of

from exl2flow.core.options.config import ConversionConfig
from exl2flow.engine.drafts import Drafter
from exl2flow.inference import (
    Draft,
    HybridDraft,
    LoadedModel,
    NgramDraft,
    Request,
    SamplingSettings,
    load_model,
)

pytestmark = pytest.mark.gpu

GREEDY = SamplingSettings.greedy()


@pytest.fixture(scope="module")
def model(llama: ConversionConfig) -> LoadedModel:
    return load_model(llama.out, device="cuda", max_tokens=512)


def drafts(model: LoadedModel) -> list[Drafter]:
    other = Draft(model=model, tokens=3, least=0.0)
    return [NgramDraft(), NgramDraft(tokens=3), other, HybridDraft(other=other)]


@pytest.mark.parametrize("which", range(4))
def test_recorded_steps_draft_what_launched_ones_do(model: LoadedModel, which: int) -> None:
    hot = SamplingSettings(temperature=1.5, repetition_penalty=1.1)
    requests = [
        Request([5, 6, 7 + i], settings=s, seed=i, stops=(), max_new_tokens=60 + i, logits=True)
        for i, s in enumerate([GREEDY, hot, GREEDY, hot, GREEDY])
    ]

    recorded, launched = (
        run(model, drafts(model)[which], requests, launched=each) for each in (False, True)
    )

    assert [*map(ids_of, recorded)] == [*map(ids_of, launched)]
    for mine, theirs in zip(recorded, launched, strict=True):
        assert mine[-1].statistics.drafted_tokens == theirs[-1].statistics.drafted_tokens
        logits = [torch.stack([x for e in each for x in e.logits]) for each in (mine, theirs)]
        assert torch.equal(*logits)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("which", range(4))
def test_greedy_texts_are_those_without_guesses(model: LoadedModel, which: int, slots: int) -> None:
    requests = [
        Request([9, 5, 7 + i], settings=GREEDY, stops=(), max_new_tokens=150, logits=True)
        for i in range(slots)
    ]
    alone = run(model, None, requests, slots=slots)

    found = run(model, drafts(model)[which], requests, slots=slots)

    assert_alike(model, requests, found, alone)


def test_the_model_guesses_its_own_tokens(model: LoadedModel) -> None:
    requests = [
        Request([5, 6, 7 + i], settings=GREEDY, stops=(), max_new_tokens=120) for i in range(3)
    ]

    ends = [e[-1].statistics for e in run(model, Draft(model=model, least=0.0), requests)]

    assert sum(s.accepted_tokens for s in ends) >= 0.98 * sum(s.drafted_tokens for s in ends) > 200
