"""Ids that a request excludes: any number of them, with all that may hold beside them."""

import math
from dataclasses import replace

import pytest
import torch

from exl2flow.engine.filters import ForeignFilter
from exl2flow.inference import Event, Generator, LoadedModel, NgramDraft, Request, SamplingSettings

HOT = SamplingSettings(temperature=2.0, top_k=0, top_p=0.0)
KEPT = {40, 41, 42, 43}
OTHERS = [i for i in range(301) if i not in KEPT]


class Few:
    """Allows ids below 43."""

    def begin(self, prefix: str) -> None: ...
    def feed(self, token: torch.Tensor) -> None: ...
    def next(self) -> tuple[list[int], list[int]]:
        return [*range(43)], []


def request(seed: int, **more: object) -> Request:
    given = {"max_new_tokens": 16, "settings": HOT, "excluded": OTHERS, "stops": (), **more}
    return Request((5, 6, 7), seed=seed, **given)


def run(generator: Generator, request: Request) -> list[Event]:
    events = list[Event]()
    generator.submit(request, deliver=events.append)
    while not generator.is_idle:
        generator.step()
    return events


def ids_of(events: list[Event]) -> list[int]:
    return [i for event in events for i in event.ids]


@pytest.mark.parametrize("draft", [None, NgramDraft()], ids=["plain", "ngram"])
def test_only_other_ids_are_sampled_alone_and_in_company(model: LoadedModel, draft) -> None:
    generator, made = Generator(model, tokens=2048, slots=4, draft=draft), dict[int, list[Event]]()
    given = [request(0), request(1, excluded=[*KEPT]), request(2, excluded=())]
    for index, each in enumerate(given):
        generator.submit(each, deliver=made.setdefault(index, []).append)
    while not generator.is_idle:
        generator.step()

    assert {*ids_of(made[0])} <= KEPT
    assert KEPT.isdisjoint(ids_of(made[1]))
    for index, each in enumerate(given):
        assert ids_of([*generator.stream(each)]) == ids_of(made[index])


def test_filters_and_stops_hold_beside_it(model: LoadedModel) -> None:
    generator = Generator(model, tokens=2048)
    filters, stops = (ForeignFilter(Few),), (40,)

    filtered = ids_of([*generator.stream(request(0, filters=filters))])
    *_, last = generator.stream(request(0, stops=stops, min_new_tokens=10))

    assert {*filtered} <= KEPT - {43}
    assert 40 not in last.ids
    assert last.statistics.new_tokens >= 10


EVERYTHING = tuple((i, -math.inf) for i in range(299))  # that the tokenizer has


@pytest.mark.parametrize("draft", [None, NgramDraft()], ids=["plain", "ngram"])
@pytest.mark.parametrize(
    "given",
    [
        {"excluded": range(301)},
        {"excluded": range(299)},
        {"excluded": range(9), "settings": replace(HOT, token_bias=EVERYTHING[9:])},
        {"excluded": (), "settings": SamplingSettings.greedy(token_bias=EVERYTHING)},
        {"excluded": {*range(301)} - {40}, "stops": (40,), "min_new_tokens": 1},
        {
            "excluded": (),
            "filters": (ForeignFilter(Few),),
            "settings": replace(HOT, token_bias=EVERYTHING[:43]),
        },
    ],
)
def test_a_request_that_leaves_no_id_says_so_and_costs_nobody_their_pages(
    model: LoadedModel, draft, given: dict[str, object]
) -> None:
    generator = Generator(model, tokens=4096, slots=2, draft=draft)
    prompt = (5, 6, *range(7, 290), *range(7, 290))
    generator.generate([prompt], max_new_tokens=1)

    [*_, last] = run(generator, request(0, **given))
    [*_, after] = run(generator, Request((*prompt, 9), max_new_tokens=1))

    assert "no token is left to sample: `excluded`" in str(last.error)
    assert after.statistics.cached_tokens >= len(prompt) - 1
    assert generator.free_pages == generator.pages


@pytest.mark.parametrize("scale", [1e38, -1e39, 1e300])
def test_guidance_of_any_strength_costs_nobody_their_pages(model: LoadedModel, scale) -> None:
    generator = Generator(model, tokens=4096, slots=2)
    prompt = (5, 6, *range(7, 290), *range(7, 290))
    generator.generate([prompt], max_new_tokens=1)
    settings = replace(HOT, cfg_scale=scale)

    [*_, last] = run(generator, Request((prompt, (5, 6, 7)), max_new_tokens=2, settings=settings))
    [*_, after] = run(generator, Request((*prompt, 9), max_new_tokens=1))

    assert last.error is None
    assert after.statistics.cached_tokens >= len(prompt) - 1


def test_another_set_counts_from_the_next_sample_on(model: LoadedModel) -> None:
    generator, events = Generator(model, tokens=2048), list[Event]()
    job = generator.submit(request(0, max_new_tokens=30), deliver=events.append)
    while len(ids_of(events)) < 10:
        generator.step()

    job.output.excluded = frozenset(range(200))
    while not generator.is_idle:
        generator.step()

    assert {*ids_of(events)[:10]} <= KEPT
    assert min(ids_of(events)[10:]) >= 200
