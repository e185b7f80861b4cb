"""Replayed steps, without a GPU: a replay runs the recorded work again."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sampled import slots_of
from tiny import make_tiny

from exl2flow.core.errors import ContextOverflow, InferenceError
from exl2flow.inference import BaseGenerator, LoadedModel, SamplingSettings, load_model, step
from exl2flow.inference.cache.paged import PagedCache
from exl2flow.inference.generate import lane
from exl2flow.inference.sampling import Kind
from exl2flow.inference.step import LaunchedStep, RecordedStep
from exl2flow.kernels import CACHE_FORMATS, PAGE_TOKENS

PROMPT = "The quick brown fox"
GREEDY = SamplingSettings.greedy()
HOT = SamplingSettings(temperature=2.0, top_k=0, top_p=0.0)
MIXED = (GREEDY, SamplingSettings(temperature=1.5), HOT)


class Again:
    """Stands in for a GPU recording."""

    made: list["Again"]

    def __init__(self, work: Callable[[], torch.Tensor], beside: "Again | None" = None) -> None:
        self.beside = beside
        self._work = work
        self.result = work()
        Again.made.append(self)

    def replay(self) -> None:
        self.result.copy_(self._work())


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Again]:
    """Record steps with `Again`, and return all recordings."""
    Again.made = []
    monkeypatch.setattr(step, "Recording", Again)
    monkeypatch.setattr(lane, "can_be_recorded", lambda decoder, cache: True)
    return Again.made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")
    return load_model(folder, device="cpu")


@pytest.fixture(scope="module")
def launched(model: LoadedModel) -> BaseGenerator:
    """Return a generator that records nothing, because its cache precedes `recordings`."""
    generator = BaseGenerator(model, cache="fp16")
    text(generator)
    return generator


@pytest.fixture
def generator(model: LoadedModel, recordings: list[Again]) -> BaseGenerator:
    return BaseGenerator(model, cache="fp16")


def text(
    generator: BaseGenerator, prompt: str = PROMPT, *, tokens: int = 12, settings=HOT
) -> tuple[int, ...]:
    made = generator.generate(
        prompt, max_new_tokens=tokens, settings=settings, seed=5, stop_tokens=()
    )
    return made.ids


def cache_of(model: LoadedModel, *, batch: int, tokens: int = 32) -> PagedCache:
    form = CACHE_FORMATS["fp16"]
    return PagedCache(model.spec, batch=batch, max_tokens=tokens, form=form, device="cpu")


@pytest.mark.parametrize("settings", [MIXED, (GREEDY,) * 3], ids=("mixed", "greedy"))
@torch.inference_mode()
def test_replays_sample_what_launches_do(
    model: LoadedModel, settings: tuple[SamplingSettings, ...], recordings: list[Again]
) -> None:
    kind = Kind.of(settings)
    draws = torch.rand(12, 3, dtype=torch.float64)
    plain, again = cache_of(model, batch=3), cache_of(model, batch=3)
    prompts = torch.randint(0, model.spec.vocab_size, (3, 21))
    for each in (plain, again):
        model.decoder.forward(prompts[:, :20], each)
    vocab = model.spec.vocab_size
    launched = LaunchedStep(model.decoder, plain, slots_of(settings, vocab))
    recorded = RecordedStep(model.decoder, again, slots_of(settings, vocab))
    for each in (launched, recorded):
        each.begin(prompts[:, 20:], kind)

    for draw in draws:
        assert recorded(draw).tolist() == launched(draw).tolist()
        assert torch.equal(recorded.logits, launched.logits)

    assert again.length == plain.length == 32
    assert len(recordings) == 1
    with pytest.raises(ContextOverflow):
        recorded(draws[0])


@torch.inference_mode()
def test_long_prompts_are_read_in_pieces(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = torch.randint(0, model.spec.vocab_size, (3, 21))
    kind, draws = Kind.of([GREEDY]), torch.rand(3, dtype=torch.float64)
    slots = slots_of((GREEDY,) * 3, model.spec.vocab_size)
    caches = [cache_of(model, batch=3) for _ in range(2)]
    whole, pieces = (LaunchedStep(model.decoder, cache, slots) for cache in caches)
    for each in (whole, pieces):
        each.begin(prompts, kind)
    read = list[int]()
    hidden = model.decoder.hidden
    whole(draws)
    monkeypatch.setattr(step, "PROMPT_TOKENS", 15)
    monkeypatch.setattr(
        model.decoder, "hidden", lambda ids, cache: read.append(ids.numel()) or hidden(ids, cache)
    )
    pieces(draws)

    assert read == [15, 15, 15, 15, 3]
    assert [cache.length for cache in caches] == [21, 21]
    torch.testing.assert_close(pieces.logits, whole.logits, atol=2e-3, rtol=2e-3)  # fp16 cache


@torch.inference_mode()
def test_prompts_without_room_are_not_read_in_part(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "PROMPT_TOKENS", 8)
    cache = cache_of(model, batch=1)
    launched = LaunchedStep(model.decoder, cache, slots_of([GREEDY], model.spec.vocab_size))
    launched.begin(torch.zeros(1, 33, dtype=torch.int64), Kind.of([GREEDY]))

    with pytest.raises(ContextOverflow):
        launched(torch.zeros(1, dtype=torch.float64))

    assert cache.length == 0


@torch.inference_mode()
def test_each_kind_of_settings_is_recorded_once(
    model: LoadedModel, recordings: list[Again]
) -> None:
    cache = cache_of(model, batch=1)
    model.decoder.forward(torch.tensor([[3, 4]]), cache)
    slots = slots_of([GREEDY], model.spec.vocab_size)
    recorded = RecordedStep(model.decoder, cache, slots)

    for settings in (GREEDY, SamplingSettings(), GREEDY, SamplingSettings(top_k=3)):
        slots.enter(0, settings, [3, 4])
        recorded.begin(torch.tensor([[5]]), Kind.of([settings]))
        assert slots.counts.tolist() == [2]
        assert cache.length == 2

    assert [each.beside for each in recordings] == [None, recordings[0]]


def test_texts_are_those_of_launched_steps(
    launched: BaseGenerator, generator: BaseGenerator, recordings: list[Again]
) -> None:
    every = (GREEDY, HOT, SamplingSettings())

    expected = [text(launched, settings=settings) for settings in every]
    assert recordings == []
    assert [text(generator, settings=settings) for settings in every] == expected

    assert len(recordings) == 3


def test_a_recording_serves_all_texts_it_has_room_for(
    launched: BaseGenerator, generator: BaseGenerator, recordings: list[Again]
) -> None:
    long = "The lazy dog jumps over the quick brown fox. " * 3

    for prompt in (long, PROMPT, "T", long, PROMPT):
        assert text(generator, prompt) == text(launched, prompt)

    assert len(recordings) == 1


def test_more_room_takes_a_new_recording(tmp_path: Path, recordings: list[Again]) -> None:
    folder = make_tiny("llama", tmp_path / "tiny", max_position_embeddings=600)
    generator = BaseGenerator(load_model(folder, device="cpu"), cache="fp16")
    ids = [3] * (PAGE_TOKENS - 4)

    for extra in (4, 5, 4):
        list(generator.stream(ids, max_new_tokens=extra, settings=GREEDY))

    assert len(recordings) == 2


def test_a_text_of_one_token_is_not_recorded(
    launched: BaseGenerator, generator: BaseGenerator, recordings: list[Again]
) -> None:
    assert text(generator, tokens=1) == text(launched, tokens=1)
    assert recordings == []


def test_a_text_that_is_given_up_leaves_no_trace(
    model: LoadedModel, launched: BaseGenerator, generator: BaseGenerator, recordings: list[Again]
) -> None:
    for count in range(1, 5):
        stream = generator.stream([7, 8, 9], max_new_tokens=20, settings=HOT)
        for _ in range(count):
            next(stream)
        del stream

        assert text(generator) == text(launched)

    assert len(recordings) == 1


def test_a_text_may_begin_before_another_one_ends(
    model: LoadedModel, launched: BaseGenerator, generator: BaseGenerator
) -> None:
    ids = model.tokenizer.encode(PROMPT, add_bos=True)
    options = {"max_new_tokens": 8, "settings": HOT, "seed": 5}
    expected = list(launched.stream(ids, **options))
    assert list(generator.stream(ids, **options)) == expected

    first = generator.stream(ids, **options)
    begun = [next(first) for _ in range(3)]
    within = list(generator.stream(ids, **options))

    assert begun + list(first) == within == expected
    assert text(generator) == text(launched)


def test_what_cannot_be_recorded_is_launched_and_tried_once(
    launched: BaseGenerator,
    generator: BaseGenerator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def fails(work: Callable[[], torch.Tensor], beside: object = None) -> None:
        work()
        tried.append(work)
        raise RuntimeError("not permitted")

    monkeypatch.setattr(step, "Recording", fails)

    for _ in range(2):
        assert text(generator) == text(launched)
    assert len(tried) == 1


@pytest.mark.parametrize("settings", [GREEDY, HOT], ids=("greedy", "hot"))
def test_logits_that_are_not_finite_end_a_text_only(
    launched: BaseGenerator,
    generator: BaseGenerator,
    settings: SamplingSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, calls = generator.model.decoder.head, []

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden)
        return head(hidden) * (torch.nan if len(calls) > 3 else 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(generator.model.decoder, "head", broken)
        with pytest.raises(InferenceError, match="the logits are not finite"):
            text(generator, settings=settings)

    assert text(generator, settings=settings) == text(launched, settings=settings)
