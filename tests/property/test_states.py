"""Texts of models whose layers have a state are as each is alone, read anew.

Drafts of n-grams, of the model's own block, and of both; bans, negative prompts, preemptions,
evictions of pages and of snapshots, moves between slots: none changes a token.
"""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mtp_checkpoints import with_block
from texts import ids_of
from tiny import TOKENIZER_SIZE

from exl2flow.engine.cache.state_store import StateStore
from exl2flow.engine.cache.states import States
from exl2flow.engine.drafts.costs import StepCosts
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.inference import (
    Event,
    Generator,
    HybridDraft,
    Job,
    LoadedModel,
    Mtp,
    NgramDraft,
    PromptCache,
    Request,
    SamplingSettings,
    load_model,
)

GREEDY = SamplingSettings.greedy()
HOT = SamplingSettings(temperature=1.2, top_k=0, top_p=1.0)
GUIDED = SamplingSettings(temperature=1.0, cfg_scale=1.5)
LENGTHS = (1, 2, 3, 60, 64, 100, 255, 256, 257, 300, 511, 513, 530, 800, 1100)


@pytest.fixture(
    scope="module",
    params=["qwen3.5-text", "qwen3-next", pytest.param("glm4-moe", marks=pytest.mark.slow)],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder, _, _ = with_block(request.param, tmp_path_factory.mktemp("model"))
    return load_model(folder, device="cpu", max_tokens=2048)


def alone(model: LoadedModel, request: Request) -> list[Event]:
    return [*Generator(model, tokens=4096, slots=2).stream(request)]


def requests(
    model: LoadedModel, source: random.Random, slots: int, together: int
) -> Iterator[Request]:
    """Yield requests; prompts come from a few beginnings, banned strings from the texts."""
    beginnings = [[source.randrange(5, TOKENIZER_SIZE) for _ in range(1100)] for _ in range(3)]

    def prompt() -> tuple[int, ...]:
        own = [source.randrange(5, TOKENIZER_SIZE) for _ in range(source.choice([0, 0, 1, 5]))]
        return (*source.choice(beginnings)[: source.choice(LENGTHS)], *own)

    for tag in range(together):
        is_guided = slots > 1 and source.random() < 0.2
        request = Request(
            (prompt(), prompt()) if is_guided else prompt(),
            max_new_tokens=source.choice([1, 5, 10, 20, 40, 280]),
            settings=GUIDED if is_guided else source.choice([GREEDY, HOT]),
            stops=(),
            seed=tag,
            tag=tag,
            end_loops=False,
        )
        if source.random() < 0.4:
            text = "".join(event.text for event in alone(model, request)) or "a"
            places = [source.randrange(len(text)) for _ in range(3)]
            banned = [text[at : at + source.choice([2, 6, 12, 25])] for at in places]
            request = dataclasses.replace(request, banned_strings=banned)
        yield request


def walk(model: LoadedModel, source: random.Random, *, jobs: int, together: int) -> None:
    """Run jobs in generators of any size, and compare their texts."""
    copies, own = NgramDraft(tokens=source.choice([1, 3, 15])), Mtp(tokens=source.choice([1, 4]))
    drafts = [None, copies, own, HybridDraft(other=own, copies=copies)]
    for _ in range(-(-jobs // together)):
        slots = source.choice([1, 2, 4])
        generator = Generator(
            model,
            tokens=source.choice([2560, 4096, 6144]),
            slots=slots,
            chunk=source.choice([256, 512, 2048]),
            draft=source.choice(drafts),
            keep=PromptCache(states=source.choice([0, 10**5, 4 * 10**5, 10**8])),
        )
        scheduler, asked = generator._scheduler, dict[Job, tuple[Request, list[Event]]]()

        def step(generator: Generator = generator, likely: float = 0.03) -> None:
            generator.step()
            scheduler = generator._scheduler
            if scheduler.running and source.random() < likely:
                with torch.inference_mode():  # as in a step
                    scheduler.preempt(scheduler.running[-1])

        for request in requests(model, source, slots, together):
            events = list[Event]()
            asked[generator.submit(request, deliver=events.append)] = request, events
            for _ in range(source.randrange(6)):
                step()
        while not generator.is_idle:
            step()
        store = scheduler.states.store
        assert store is None or store.nbytes <= 10**8
        assert generator.free_pages == generator.pages
        for request, events in asked.values():
            assert events[-1].error is None
            assert ids_of(events) == ids_of(alone(model, request)), request


@pytest.fixture(autouse=True)
def _any_number_of_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft any number of tokens, whatever was accepted; read steps late, as a GPU does, or not."""
    source = random.Random(0)
    late = property(lambda _: source.random() < 0.8)
    monkeypatch.setattr(DeviceSlots, "is_asynchronous", late)

    def chosen(_self: StepCosts, _slots: int, _kind: str, _rate: float, most: int) -> int:
        return source.randint(0, most)

    monkeypatch.setattr(StepCosts, "best", chosen)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count what happens to states."""
    counts: dict[str, int] = {}

    def counted(work: Any, name: str, *given: Any, **options: Any) -> Any:
        counts[name] = counts.get(name, 0) + 1
        return work(*given, **options)

    for owner, name in (
        (States, "save"),
        (States, "load"),
        (States, "hold"),
        (States, "go_back"),
        (States, "move"),
        (StateStore, "_evict"),
    ):
        work = getattr(owner, name)

        def replaced(*given: Any, work: Any = work, name: str = name, **options: Any) -> Any:
            return counted(work, name, *given, **options)

        monkeypatch.setattr(owner, name, replaced)
    return counts


def test_texts_are_as_they_are_alone(model: LoadedModel, calls: dict[str, int]) -> None:
    for seed in (9, 2):  # everything happens to a state in these few texts
        walk(model, random.Random(seed), jobs=6, together=6)
    everything = {"save", "load", "hold", "go_back", "move", "_evict"}
    assert not model.spec.deltas or everything <= {*calls}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_texts_are_as_they_are_alone(model: LoadedModel, seed: int) -> None:
    walk(model, random.Random(seed), jobs=100, together=12)
