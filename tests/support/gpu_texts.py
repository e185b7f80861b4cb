"""Texts on a GPU with and without drafts, recorded and launched."""

from collections.abc import Sequence

import texts
import torch
from texts import ids_of

from exl2flow.engine.drafts import Drafter
from exl2flow.inference import Event, Generator, LoadedModel, Request
from exl2flow.model.layers.experts import ExpertsSublayer

NEAR_TIE = 2**-6  # of the greatest logit: a hidden state is rounded by 2^-11, some dozens of times
NEAR_ROUTE = 0.99  # of the score of an expert that is chosen


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


@torch.inference_mode()
def first_near_route(model: LoadedModel, ids: Sequence[int], begin: int) -> int | None:
    """Return the first position from `begin` on where a router nearly chose another expert."""
    hidden = model.decoder.embed(torch.tensor([ids], device=model.decoder.placement.head))
    near = torch.zeros(len(ids), device=hidden.device)
    for sublayer in model.decoder.sublayers:
        if isinstance(sublayer, ExpertsSublayer):
            near = near.maximum(sublayer.nearly_chosen(hidden).amax(-1))
        hidden = sublayer(hidden)
    return next((i for i, ratio in enumerate(near[begin:].tolist()) if ratio > NEAR_ROUTE), None)


def assert_alike(
    model: LoadedModel,
    requests: Sequence[Request],
    found: Sequence[list[Event]],
    alone: Sequence[list[Event]],
) -> None:
    """Check that greedy texts, the latter with logits, differ only behind near ties.

    Those are also of routers. A quarter of all ids is compared at least.
    """
    compared = total = 0
    for request, mine, theirs in zip(requests, found, alone, strict=True):
        logits = torch.stack([x for e in theirs for x in e.logits]).float()
        ids, prompt = ids_of(theirs), [*map(int, request.prompt)]
        near = first_near_route(model, [*prompt, *ids[:-1]], len(prompt) - 1)
        until, total = len(ids) if near is None else near, total + len(ids)
        for row, one, other in zip(logits[:until], ids_of(mine), ids, strict=False):
            compared += 1
            if one != other:  # only a near tie may go the other way; then the texts differ
                assert row[other] - row[one] <= NEAR_TIE * row.abs().max()
                break
    assert compared >= total / 4
