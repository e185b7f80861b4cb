"""Texts with adapters: those of merged weights, in any company, from their own pages."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from adapters import make_adapter, merged
from decoding import Again
from small_pages import PAGE_TOKENS, small_generator
from tiny import VOCAB_SIZE, make_tiny
from transformers import AutoModelForCausalLM

from exl2flow.core.errors import OutOfDeviceMemory
from exl2flow.engine.adapters import AdapterSlots
from exl2flow.inference import (
    Adapter,
    Draft,
    Event,
    Generator,
    Job,
    LoadedModel,
    NgramDraft,
    Request,
    SamplingSettings,
    load_model,
)
from exl2flow.kernels.cuda import graphs as cuda_graphs
from exl2flow.model.layers.low_rank import LowRank

GREEDY = SamplingSettings.greedy()
HOT = SamplingSettings(temperature=1.5, top_k=0, top_p=0.0, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def folders(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return adapters of different ranks and scalings, the last one of two linears only."""
    root = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(root / "a", source, rank=4, alpha=2, seed=1),
        make_adapter(root / "b", source, rank=7, alpha=3, seed=2, use_rslora=True),
        make_adapter(root / "c", source, rank=1, alpha=0.5, seed=3, linears=("q_proj", "v_proj")),
    ]


@pytest.fixture(scope="module")
def model(source: Path) -> LoadedModel:
    return load_model(source, device="cpu", max_tokens=1024)


@pytest.fixture(scope="module")
def adapters(folders: list[Path], model: LoadedModel) -> list[Adapter]:
    return [Adapter.load(folder, model) for folder in folders]


def prompt(seed: int, tokens: int = 0) -> tuple[int, ...]:
    source = random.Random(seed)
    count = tokens or source.randint(2, 40)
    return tuple(source.randrange(3, VOCAB_SIZE) for _ in range(count))


def request(tag: int, *adapters: Adapter, **more: object) -> Request:
    options = {"max_new_tokens": 16, "settings": GREEDY, "stops": (), "seed": tag, **more}
    return Request(**{"prompt": prompt(tag), "adapters": adapters, "tag": tag, **options})


def ids_of(generator: Generator, *requests: Request) -> dict[object, tuple[int, ...]]:
    """Return the ids of each request, which are generated together."""
    found: dict[object, tuple[int, ...]] = {}
    for event in generator.stream(*requests):
        found[event.tag] = found.get(event.tag, ()) + event.ids
    assert generator.is_idle
    assert generator.free_pages == generator.pages
    return found


def alone(model: LoadedModel, each: Request) -> tuple[int, ...]:
    return ids_of(Generator(model, tokens=2048, slots=2), each)[each.tag]


def reference(folder: Path, ids: Sequence[int], count: int, known: int) -> tuple[int, ...]:
    """Return the greedy text of transformers."""
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).generate(
        torch.tensor([ids]),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        suppress_tokens=[*range(known, VOCAB_SIZE)],
    )
    return tuple(made[0, len(ids) :].tolist())


@pytest.mark.parametrize("chosen", [(0,), (0, 1, 2)], ids=str)
def test_greedy_text_is_that_of_merged_weights(
    source: Path,
    folders: list[Path],
    model: LoadedModel,
    adapters: list[Adapter],
    tmp_path: Path,
    chosen: tuple[int, ...],
) -> None:
    folder = merged(tmp_path / "merged", source, *(folders[i] for i in chosen))

    found = alone(model, request(1, *(adapters[i] for i in chosen)))

    assert found == reference(folder, prompt(1), 16, model.tokenizer.vocab_size)
    assert found != alone(model, request(1))


def test_a_loaded_scaling_counts(
    source: Path, folders: list[Path], model: LoadedModel, tmp_path: Path
) -> None:
    half = Adapter.load(folders[0], model, scaling=-0.5)
    folder = merged(tmp_path / "merged", source, folders[0], scaling=-0.5)

    found = alone(model, request(3, half))

    assert found == reference(folder, prompt(3), 16, model.tokenizer.vocab_size)


def test_text_is_the_same_alone_and_beside_other_adapters(
    model: LoadedModel, adapters: list[Adapter]
) -> None:
    a, b, c = adapters
    sets = [(), (a,), (b,), (c,), (a, b), (), (b, a), (a, b, c)]
    every = [request(tag, *used, settings=HOT) for tag, used in enumerate(sets)]

    together = ids_of(Generator(model, tokens=8192, slots=8), *every)
    few_slots = ids_of(Generator(model, tokens=8192, slots=3), *reversed(every))

    assert together == few_slots
    assert together == {each.tag: alone(model, each) for each in every}


def test_both_prompts_of_a_pair_use_the_adapters(
    source: Path, folders: list[Path], model: LoadedModel, adapters: list[Adapter], tmp_path: Path
) -> None:
    folder = merged(tmp_path / "merged", source, folders[0])
    pair = {"prompt": (prompt(1), prompt(2)), "settings": SamplingSettings.greedy(cfg_scale=2.0)}

    found = ids_of(
        Generator(model, tokens=4096, slots=4), request(0, adapters[0], **pair), request(1)
    )
    expected = alone(load_model(folder, device="cpu", max_tokens=1024), request(0, **pair))

    assert found[0] == expected


def test_pages_are_shared_between_equal_adapters_only(
    folders: list[Path], model: LoadedModel, adapters: list[Adapter]
) -> None:
    a, b, _ = adapters
    again, ids = Adapter.load(folders[0], model), prompt(5, 40)
    generator = small_generator(model, tokens=512, slots=2)

    def cached(*used: Adapter) -> int:
        wanted = request(0, *used, prompt=ids, max_new_tokens=4)
        [*_, last] = generator.stream(wanted)
        assert last.statistics is not None
        return last.statistics.cached_tokens

    assert [cached(), cached(a), cached(b), cached(a, b)] == [0, 0, 0, 0]
    assert [cached(), cached(again), cached(b), cached(b, a)] == [39, 39, 39, 39]


def test_jobs_that_were_sent_back_keep_their_adapters(
    model: LoadedModel, adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [
        request(tag, *adapters[: tag % 3], max_new_tokens=20, settings=HOT) for tag in range(4)
    ]
    roomy = ids_of(Generator(model, tokens=8192, slots=4), *every)
    cramped = small_generator(model, tokens=5 * PAGE_TOKENS, slots=4)
    preempted, preempt = list[Job](), cramped._scheduler.preempt
    monkeypatch.setattr(
        cramped._scheduler, "preempt", lambda job: (preempted.append(job), preempt(job))
    )

    assert ids_of(cramped, *every) == roomy
    assert {len(job.adapters) for job in preempted} & {1, 2}


def test_a_banned_string_cuts_a_text_with_adapters_back(
    model: LoadedModel, adapters: list[Adapter]
) -> None:
    plain = alone(model, request(1, adapters[0]))
    ban = model.tokenizer.decode(plain[2:4]).strip()
    wanted = [request(1, adapters[0], banned_strings=[ban]), request(2, adapters[1])]

    found = ids_of(Generator(model, tokens=4096, slots=4), *wanted)

    assert ban.lower() not in model.tokenizer.decode(found[1]).lower()
    assert found == {each.tag: alone(model, each) for each in wanted}


@pytest.mark.parametrize("draft", ["model", "ngram"])
def test_drafts_change_no_text_with_adapters(
    model: LoadedModel, adapters: list[Adapter], draft: str
) -> None:
    a, b, _ = adapters
    every = [request(tag, *used, settings=HOT) for tag, used in enumerate([(), (a,), (b, a)])]
    drafter = Draft(model=model, least=0.0) if draft == "model" else NgramDraft()

    found = ids_of(Generator(model, tokens=4096, slots=3, draft=drafter), *every)

    assert found == {each.tag: alone(model, each) for each in every}


def test_a_generator_whose_jobs_use_none_stays_as_it_was(
    model: LoadedModel, adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, used = model.decoder, []

    def look(decoder: object) -> None:
        used.append(decoder is not plain)

    for name in ("for_slots", "for_texts"):
        ask = getattr(AdapterSlots, name)
        monkeypatch.setattr(AdapterSlots, name, lambda *x, ask=ask: (look(d := ask(*x)), d)[1])
    generator = Generator(model, tokens=4096, slots=4)
    ids_of(generator, request(0), request(1))
    assert not any(used)
    assert not generator._device_slots._adapters._parts

    ids_of(generator, request(2, adapters[0], max_new_tokens=4), request(3, max_new_tokens=40))

    assert any(used)
    assert not any(used[-30:])  # the other text goes on with the model as it is


def test_a_text_with_values_that_are_not_finite_harms_no_other(
    model: LoadedModel, adapters: list[Adapter]
) -> None:
    huge = Adapter(
        digest=b"huge",
        folder=Path("huge"),
        model=adapters[0].model,
        rank=4,
        matrices={key: (1e38 * a, 1e38 * b) for key, (a, b) in adapters[0].matrices.items()},
    )
    generator = Generator(model, tokens=4096, slots=4)
    events: list[Event] = []

    generator.submit(request(0, huge), deliver=events.append)
    found = ids_of(generator, request(1, adapters[1]), request(2))

    assert events[-1].reason == "error"
    assert found == {1: alone(model, request(1, adapters[1])), 2: alone(model, request(2))}


def test_an_adapter_without_room_in_memory_ends_its_texts_only(
    model: LoadedModel, adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = adapters
    generator = Generator(model, tokens=4096, slots=4)
    first, second = request(1, a, max_new_tokens=40), request(2, max_new_tokens=40)
    events: list[Event] = []
    for each in (first, second):
        generator.submit(each, deliver=events.append)
    while not any(event.ids for event in events):
        generator.step()

    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(LowRank, "room", no_room)
        failed = generator.submit(request(3, b), deliver=events.append)
        generator.step()
    assert failed.is_done
    later = request(4, b, a)
    generator.submit(later, deliver=events.append)
    while not generator.is_idle:
        generator.step()

    assert [type(e.error) for e in events if e.error] == [OutOfDeviceMemory]
    made = {tag: sum((e.ids for e in events if e.tag == tag), ()) for tag in (1, 2, 4)}
    assert made == {each.tag: alone(model, each) for each in (first, second, later)}


def test_recorded_steps_follow_the_slots_adapters(
    model: LoadedModel, adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    Again.made = []
    monkeypatch.setattr(cuda_graphs, "CudaGraph", Again)
    a, b, c = adapters
    sets = [(), (a,), (b,), (), (c,), (a, b), (a, c), (c,)]
    every = [
        request(tag, *used, settings=HOT, max_new_tokens=4 + 3 * tag)
        for tag, used in enumerate(sets)
    ]
    generator = Generator(model, tokens=8192, slots=3)
    generator._device_slots.graphs.records = True

    found = ids_of(generator, *every, request(9, max_new_tokens=60))

    every.append(request(9, max_new_tokens=60))
    assert found == {each.tag: alone(model, each) for each in every}
    marks = {key[2] for key in generator._device_slots.graphs._graphs if isinstance(key[2], str)}
    assert marks == {"plain", "adapted"}


def test_a_text_given_up_leaves_its_slot_to_texts_without_adapters(
    model: LoadedModel, adapters: list[Adapter]
) -> None:
    generator = Generator(model, slots=1)
    expected = ids_of(generator, request(1))

    events = generator.stream(request(0, adapters[0]))
    next(event for event in events if event.ids)
    events.close()

    assert generator.is_idle
    assert ids_of(generator, request(1)) == expected
