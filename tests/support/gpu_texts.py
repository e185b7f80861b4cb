"""Texts on a GPU with and without drafts, recorded and launched."""

from collections.abc import Sequence

import texts
import torch
from texts import ids_of

from exl2flow.engine.drafts import Drafter
from exl2flow.inference import Event, Generator, LoadedModel, Request

NEAR_TIE = 2**-6  # of the greatest logit, as in test_step


def run(
    model: LoadedModel,
    draft: Drafter | None,
    requests: Sequence[Request],
    *,
    launched: bool = False,
    slots: int = 4,
) -> list[list[Event]]:
    """Return the events of each request; `launched`: of steps that are not recorded."""
    generator = Generator(model, tokens=4096, slots=slots, draft=draft)
    if launched:
        generator._device_slots.graphs.records = False
    found = texts.run(generator, requests)
    assert generator._device_slots.graphs.records != launched
    return found


def assert_alike(found: Sequence[list[Event]], alone: Sequence[list[Event]]) -> None:
    """Check that greedy texts, the latter with logits, differ only behind near ties."""
    for mine, theirs in zip(found, alone, strict=True):
        logits = torch.stack([x for e in theirs for x in e.logits]).float()
        for place, (one, other) in enumerate(zip(ids_of(mine), ids_of(theirs), strict=True)):
            row = logits[place]
            if one != other:  # only a near tie may go the other way; then the texts differ
                assert row[other] - row[one] <= NEAR_TIE * row.abs().max()
                break
