"""Replayed steps give the same logits and samples as launched ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conversions import small_config
from sampled import slots_of
from stage_runs import run_until
from tiny import make_tiny

from exl2flow.core.errors import ContextOverflow
from exl2flow.inference import BaseGenerator, LoadedModel, SamplingSettings, load_model, step
from exl2flow.inference.cache.paged import PagedCache
from exl2flow.inference.generate.base import Generation
from exl2flow.inference.sampling import Kind, SamplerSlots, sample
from exl2flow.inference.step import LaunchedStep, RecordedStep, Recording
from exl2flow.kernels import CACHE_FORMATS

pytestmark = pytest.mark.gpu

GREEDY = SamplingSettings.greedy()
HOT = SamplingSettings(temperature=2.0, top_k=0, top_p=0.0)
KINDS = {
    "greedy": (GREEDY,),
    "default": (SamplingSettings(),),
    "hot": (HOT,),
    "mixed": (GREEDY, SamplingSettings(temperature=1.5, top_k=100, min_p=0.02), HOT),
}
NEAR_TIE = 2**-6  # of the greatest logit: a hidden state is rounded by 2^-11, some dozens of times


@pytest.fixture(scope="module", params=["llama", "mistral"])  # mistral has windows
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("model")
    windows = {"sliding_window": 40} if request.param == "mistral" else {}
    source = make_tiny(request.param, folder / "source", head_dim=64, **windows)
    config = small_config(source, folder / "out", bpw=4.0)
    run_until(config, "compile")
    return load_model(config.out, device="cuda")


def cache_of(model: LoadedModel, name: str, batch: int) -> PagedCache:
    return PagedCache(
        model.spec, batch=batch, max_tokens=64, form=CACHE_FORMATS[name], device="cuda"
    )


def slots_for(model: LoadedModel, kind: str, batch: int, device: str = "cuda") -> SamplerSlots:
    settings = KINDS[kind]
    every = [settings[i % len(settings)] for i in range(batch)]
    return slots_of(every, model.spec.vocab_size, device=device)


def draws_of(count: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.rand(count, batch, generator=generator, dtype=torch.float64).cuda()


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recording]]:
    """Return all recordings made from now on."""
    made: list[Recording] = []

    class Listed(Recording):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(step, "Recording", Listed)
    yield made
    made.clear()


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("name", ["fp16", "q4"])
@torch.inference_mode()
def test_a_replay_is_a_step(model: LoadedModel, name: str, batch: int) -> None:
    ids = torch.randint(0, model.spec.vocab_size, (batch, 64), device="cuda")
    cache, again = cache_of(model, name, batch), cache_of(model, name, batch)
    for each in (cache, again):
        model.decoder.forward(ids[:, :20], each)
    recorded = RecordedStep(model.decoder, again, slots_for(model, "greedy", batch))
    draws = draws_of(1, batch)[0]

    for position in range(20, 64):
        token = ids[:, position : position + 1]
        recorded.begin(token, Kind.of([GREEDY]))
        recorded(draws)
        assert torch.equal(recorded.logits, model.decoder.forward(token, cache))

    assert again.length == 64
    with pytest.raises(ContextOverflow):
        recorded(draws)


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_recorded_samples_are_those_of_the_chain(model: LoadedModel, kind: str, batch: int) -> None:
    ids = torch.randint(0, model.spec.vocab_size, (batch, 20), device="cuda")
    operations, draws = Kind.of(KINDS[kind]), draws_of(44, batch)
    on_cpu = slots_for(model, kind, batch, "cpu")
    cache, again = cache_of(model, "fp16", batch), cache_of(model, "fp16", batch)
    for each in (cache, again):
        model.decoder.forward(ids[:, :19], each)
    launched = LaunchedStep(model.decoder, cache, slots_for(model, kind, batch))
    recorded = RecordedStep(model.decoder, again, slots_for(model, kind, batch))
    for each in (launched, recorded):
        each.begin(ids[:, 19:], operations)

    for draw in draws:
        found = recorded(draw).tolist()
        assert found == launched(draw).tolist()
        logits = recorded.logits[:, 0].cpu()
        assert found == sample(logits, on_cpu, draw.cpu(), operations).ids.tolist()


@torch.inference_mode()
def test_kinds_of_settings_may_alternate(model: LoadedModel, recordings: list[Recording]) -> None:
    ids = torch.randint(0, model.spec.vocab_size, (3, 20), device="cuda")
    cache, again = cache_of(model, "fp16", 3), cache_of(model, "fp16", 3)
    for each in (cache, again):
        model.decoder.forward(ids[:, :19], each)
    slots = [slots_for(model, "mixed", 3) for _ in range(2)]
    launched = LaunchedStep(model.decoder, cache, slots[0])
    recorded = RecordedStep(model.decoder, again, slots[1])
    pending = ids[:, 19:]

    for draw, kind in zip(draws_of(20, 3), [*KINDS] * 5, strict=True):
        for each, state in zip((launched, recorded), slots, strict=True):
            for slot in range(3):
                state.enter(slot, KINDS[kind][slot % len(KINDS[kind])], ())
            each.begin(pending, Kind.of(KINDS[kind]))
        pending = launched(draw)[:, None]
        assert torch.equal(recorded(draw), pending[:, 0])

    assert len(recordings) == 3  # hot and mixed settings are of one kind


@torch.inference_mode()
def text_with_launches(model: LoadedModel, *, max_new_tokens: int) -> Generation:
    """Return greedy text, with each step launched separately."""
    prompt, made = "The quick", list[int]()
    ids = model.tokenizer.encode(prompt, add_bos=True)
    cache = cache_of(model, "fp16", 1)
    pending = torch.tensor([ids], device="cuda")
    for _ in range(max_new_tokens):
        made.append(int(model.decoder.forward(pending, cache)[0, -1].argmax()))
        pending = torch.tensor([made[-1:]], device="cuda")
    text = model.tokenizer.decode([*ids, *made]).removeprefix(model.tokenizer.decode(ids))
    return Generation(prompt=prompt, text=text, ids=tuple(made), reason="max_new_tokens")


def test_greedy_text_is_the_same(model: LoadedModel) -> None:
    options = {"max_new_tokens": 30, "settings": GREEDY, "stop_tokens": ()}

    recorded = BaseGenerator(model).generate("The quick", **options)

    assert recorded == text_with_launches(model, max_new_tokens=30)


def test_a_step_that_cannot_be_recorded_is_launched(tmp_path: Path) -> None:
    few = {"num_attention_heads": 8}  # of 8 dims each: no kernel attends to heads so small
    folder = make_tiny("llama", tmp_path / "source", **few)
    options = {"max_new_tokens": 10, "settings": GREEDY, "stop_tokens": ()}
    model = load_model(folder, device="cuda")
    cache = cache_of(model, "fp16", 1)
    recorded = RecordedStep(model.decoder, cache, slots_for(model, "greedy", 1))
    with torch.inference_mode(), pytest.raises(RuntimeError):
        recorded.begin(torch.zeros(1, 1, dtype=torch.int64), Kind.of([GREEDY]))
    assert cache.length == 0

    text = BaseGenerator(model).generate("The quick", **options)

    assert text == text_with_launches(model, max_new_tokens=10)


@torch.inference_mode()
def greedy(
    model: LoadedModel, ids: torch.Tensor, kind: type[LaunchedStep] | type[RecordedStep]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 30 greedy ids (b, 30) after the prompts, and their logits (b, 30, v)."""
    batch = len(ids)
    slots, draws = slots_for(model, "greedy", batch), draws_of(1, batch)[0]
    cache = cache_of(model, "fp16", batch)
    prompt = LaunchedStep(model.decoder, cache, slots)
    prompt.begin(ids, Kind.of([GREEDY]))
    made, logits = [prompt(draws)], [prompt.logits]
    step = kind(model.decoder, cache, slots)
    step.begin(prompt.ids, Kind.of([GREEDY]))
    for _ in range(29):
        made.append(step(draws).clone())
        logits.append(step.logits.clone())
    return torch.stack(made, dim=1), torch.cat(logits, dim=1)


def test_greedy_texts_of_a_batch_are_those_of_each_alone(model: LoadedModel) -> None:
    """Launches depend on the batch: a text may diverge at a near-tie, and only there."""
    ids = torch.randint(0, model.spec.vocab_size, (16, 20), device="cuda")

    together, together_logits = greedy(model, ids, RecordedStep)
    assert torch.equal(together, greedy(model, ids, LaunchedStep)[0])
    for row in range(16):
        alone, logits = (x[0] for x in greedy(model, ids[row : row + 1], RecordedStep))
        differs = (alone != together[row]).nonzero()
        until = int(differs[0]) + 1 if len(differs) else len(alone)
        bound = NEAR_TIE * float(logits.abs().max())
        torch.testing.assert_close(
            together_logits[row, :until], logits[:until], rtol=0, atol=bound / 2
        )
        if len(differs):
            first, second = logits[until - 1].topk(2).values
            assert float(first - second) < bound


@pytest.mark.parametrize("settings", [GREEDY, SamplingSettings(), HOT], ids=str)
def test_texts_reuse_a_recording(
    model: LoadedModel, settings: SamplingSettings, recordings: list[Recording]
) -> None:
    options = {"max_new_tokens": 30, "settings": settings, "seed": 3, "stop_tokens": ()}
    prompts = ("The quick brown fox jumps over", "The", "A tokenizer", "The")
    fresh = [BaseGenerator(model).generate(prompt, **options) for prompt in prompts]
    recordings.clear()
    generator = BaseGenerator(model)

    for prompt, expected in zip(prompts, fresh, strict=True):
        assert generator.generate(prompt, **options) == expected
        stream = generator.stream([5, 6], max_new_tokens=30, settings=settings)
        assert len([next(stream) for _ in range(4)]) == 4
        del stream  # abandoned while a replay is in flight

    assert len(recordings) == 1


def test_a_text_may_begin_before_another_one_ends(model: LoadedModel) -> None:
    options = {"max_new_tokens": 20, "settings": HOT, "seed": 4}
    generator = BaseGenerator(model)
    expected = list(generator.stream([5, 6, 7], **options))

    first = generator.stream([5, 6, 7], **options)
    begun = [next(first) for _ in range(5)]
    within = list(generator.stream([5, 6, 7], **options))

    assert begun + list(first) == within == expected
