"""Recorded steps, without a GPU: a replay runs the recorded work again."""

from collections.abc import Callable

import pytest
import torch
from decoding import GREEDY, HOT, Again, Slots, prompts_of, text_alone
from tiny import make_tiny

from exl2flow.engine.sampling import Kind
from exl2flow.inference import Generator, LoadedModel, Request, SamplingSettings, load_model
from exl2flow.kernels.cuda import graphs as cuda_graphs
from exl2flow.kernels.cuda.graphs import ROWS, bucket

MIXED = (GREEDY, SamplingSettings(temperature=1.5), HOT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny("llama", folder, max_position_embeddings=512)
    return load_model(folder, device="cpu")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Again]:
    """Record with `Again` from now on, and return all recordings."""
    Again.made = []
    monkeypatch.setattr(cuda_graphs, "CudaGraph", Again)
    return Again.made


def recorded(model: LoadedModel, **options: object) -> Slots:
    slots = Slots(model, **options)
    slots.steps.graphs.records = True
    return slots


@pytest.mark.parametrize("settings", [MIXED, (GREEDY,) * 3], ids=("mixed", "greedy"))
def test_replayed_and_launched_samples_are_equal(
    model: LoadedModel, settings: tuple[SamplingSettings, ...], graphs: list[Again]
) -> None:
    found, expected = recorded(model, slots=4), Slots(model, slots=4)
    for slot, (each, ids) in enumerate(zip(settings, prompts_of(model), strict=False)):
        for slots in (found, expected):
            slots.enter(slot, ids, each)

    for slots in (found, expected):
        slots.run(10)

    assert found.sampled == expected.sampled
    for slot in range(3):
        assert torch.equal(torch.stack(found.logits[slot]), torch.stack(expected.logits[slot]))
    for mine, theirs in zip(
        found.steps.sampler.tensors(), expected.steps.sampler.tensors(), strict=True
    ):
        assert torch.equal(
            mine[:3, :-1] if mine.dim() > 1 else mine[:3],
            theirs[:3, :-1] if theirs.dim() > 1 else theirs[:3],
        )
    assert torch.equal(found.steps.lengths, expected.steps.lengths)
    assert len(graphs) == 2


def test_each_kind_and_each_number_of_rows_is_recorded_once(
    model: LoadedModel, graphs: list[Again]
) -> None:
    slots, prompts = recorded(model, slots=4), prompts_of(model)

    for settings in (GREEDY, SamplingSettings(), GREEDY, SamplingSettings(top_k=3)):
        slots.enter(0, prompts[0], settings)
        slots.run(2)
    assert len(graphs) == 3  # of the forward pass, an argmax, and 64 candidates
    slots.enter(2, prompts[1])
    slots.run(2)
    slots.enter(3, prompts[2])
    slots.run(2)

    assert len(graphs) == 5
    assert [each.beside for each in graphs] == [None, *[graphs[0]] * 4]


def test_a_recording_is_made_beside_a_text(model: LoadedModel, graphs: list[Again]) -> None:
    found, ids = recorded(model, slots=8), prompts_of(model)[3]
    found.enter(0, ids, HOT)
    found.run(3)
    for slot in (1, 2, 6):  # each needs more rows
        found.enter(slot, [5, 6])
        found.run(2)

    assert found.sampled[0] == text_alone(model, ids, HOT, 9).sampled[0]
    assert len(graphs) == 8


@torch.inference_mode()
def test_warmed_up_steps_are_not_recorded_again(model: LoadedModel, graphs: list[Again]) -> None:
    slots, prompts = recorded(model, slots=5), prompts_of(model)
    slots.enter(0, prompts[0])

    slots.steps.warm_up([Kind.of([GREEDY]), Kind.of([HOT])])

    # 1, 2, 4 and 5 rows: two kinds and the forward pass; ends of 1, 2 and 4 prompts
    assert len(graphs) == 4 * 3 + 3
    for slot, ids in enumerate(prompts[1:], 1):
        slots.run()
        slots.enter(slot, ids, HOT)
    slots.run()
    assert len(graphs) == 15
    alone = text_alone(model, prompts[0], GREEDY, 5)
    assert slots.sampled[0] == alone.sampled[0]


@pytest.mark.parametrize("lengths", [(3,), (8, 20), (1, 64, 9), (30, 2, 17, 5)])
def test_ends_of_prompts_are_read_in_recorded_passes(
    model: LoadedModel, graphs: list[Again], lengths: tuple[int, ...]
) -> None:
    """Each text fills the context."""
    source, context = torch.Generator().manual_seed(0), 512
    prompts = [
        torch.randint(2, model.spec.vocab_size, (context - 20,), generator=source).tolist()
        for _ in lengths
    ]
    recorded = Generator(model, tokens=4096, slots=4)
    recorded._device_slots.graphs.records = True
    for ids, length in zip(prompts, lengths, strict=True):
        [*recorded.stream(Request(ids[:-length], stops=(), max_new_tokens=1))]

    def texts(generator: Generator) -> dict[object, list[int]]:
        found = dict[object, list[int]]()
        wanted = [
            Request(ids, settings=GREEDY, stops=(), max_new_tokens=20, tag=i)
            for i, ids in enumerate(prompts)
        ]
        for event in generator.stream(*wanted):
            found.setdefault(event.tag, []).extend(event.ids)
        return found

    assert texts(recorded) == texts(Generator(model, tokens=4096, slots=4))
    assert ("tails", bucket(len(lengths))) in recorded._device_slots.graphs._graphs


def test_warming_up_leaves_pages_alone_that_another_text_has_now(
    model: LoadedModel, graphs: list[Again]
) -> None:
    first, second = torch.randint(2, model.spec.vocab_size, (2, 400)).tolist()
    generator = Generator(model, tokens=512, slots=1)
    generator._device_slots.graphs.records = True
    for count in (300, 305):
        [*generator.stream(Request(first[:count], stops=(), max_new_tokens=1))]
    request = Request(second, settings=GREEDY, stops=(), max_new_tokens=40)
    found = list[int]()

    for event in generator.stream(request):
        if event.ids and not found:
            generator.warmup()
        found += event.ids

    expected = Generator(model, tokens=512, slots=1).stream(request)
    assert found == [token for event in expected for token in event.ids]


def test_steps_that_cannot_be_recorded_are_tried_once_and_launched(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fails(work: Callable[[], object], beside: object = None) -> None:
        work()
        tried.append(work)
        raise RuntimeError("not permitted")

    monkeypatch.setattr(cuda_graphs, "CudaGraph", fails)
    slots, ids = recorded(model, slots=3), prompts_of(model)[0]
    for slot in range(2):
        slots.enter(slot, ids, HOT)

    slots.run(6)

    assert slots.sampled[0] == slots.sampled[1] == text_alone(model, ids, HOT, 6).sampled[0]
    assert len(tried) == 2  # the forward pass and sampling


def test_rows_of_a_recording_are_those_needed_or_a_few_more() -> None:
    assert [bucket(count) for count in (1, 2, 3, 5, 9, 17, 25, 32)] == [1, 2, 4, 8, 16, 24, 32, 32]
    assert [bucket(count) for count in (33, 48, 49, 64, 65, 97)] == [48, 48, 64, 64, 96, 128]
    assert all(bucket(rows) == rows for rows in ROWS)
