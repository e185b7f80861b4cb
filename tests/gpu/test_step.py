"""Recorded steps give the same logits and samples as launched ones."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from decoding import GREEDY, HOT, Slots
from gpu_texts import NEAR_TIE, first_near_route
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.engine.sampling import Kind, SamplerSlots, completed, sample
from exl2flow.inference import Generator, LoadedModel, SamplingSettings, load_model
from exl2flow.kernels.cuda.graphs import CudaGraph

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
KINDS = {
    "greedy": (GREEDY,),
    "default": (SamplingSettings(),),
    "hot": (HOT,),
    "mixed": (GREEDY, SamplingSettings(temperature=1.5, top_k=100, min_p=0.02), HOT),
    "penalties": (SamplingSettings(repetition_penalty=1.2, dry_multiplier=0.8), GREEDY),
}
ROWS = (1, 2, 4, 16, 32, 64)


@pytest.fixture(scope="module", params=["llama", "mistral", "mixtral"])  # windows; experts
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(request.getfixturevalue(request.param).out, device=DEVICE)


def prompts_of(model: LoadedModel, count: int) -> list[list[int]]:
    """Return prompts of different lengths."""
    rows = torch.randint(2, model.spec.vocab_size, (count, 60)).tolist()
    return [row[: 3 + 7 * index % 57] for index, row in enumerate(rows)]


def entered(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[SamplingSettings] = (GREEDY,),
    *,
    places: Sequence[int] = (),
    **options: object,
) -> Slots:
    """Return slots that the prompts have entered, in order or at the places."""
    slots = Slots(model, **{"slots": len(prompts), "tokens": 128, "name": "fp16", **options})
    for index, ids in enumerate(prompts):
        slots.enter(places[index] if places else index, ids, settings[index % len(settings)])
    return slots


def stacked(slots: Slots, slot: int) -> torch.Tensor:
    return torch.stack(slots.logits[slot])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["fp16", "q4"])
def test_a_replay_is_a_step(
    model: LoadedModel, name: str, rows: int, graphs: list[CudaGraph]
) -> None:
    prompts = prompts_of(model, rows)
    recorded = entered(model, prompts, name=name)
    launched = entered(model, prompts, name=name, launched=True)

    for slots in (recorded, launched):
        slots.run(30)

    assert len(graphs) == 2
    assert recorded.sampled == launched.sampled
    for slot in range(rows):
        assert torch.equal(stacked(recorded, slot), stacked(launched, slot))
    assert torch.equal(recorded.steps.lengths, launched.steps.lengths)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_samples_are_those_of_the_chain(model: LoadedModel, kind: str, rows: int) -> None:
    prompts = prompts_of(model, rows)
    recorded = entered(model, prompts, KINDS[kind])
    launched = entered(model, prompts, KINDS[kind], launched=True)
    at = launched.steps
    cpu = SamplerSlots(
        slots=rows,
        max_tokens=128,
        vocab_size=at.sampler.vocab_size,
        width=at.sampler.width,
        device="cpu",
    )
    for slot, ids in enumerate(prompts):
        cpu.enter(slot, completed(launched.settings[slot], model.tokenizer), ids)
    chosen = Kind.of(launched.settings.values())

    for draws in torch.rand(8, rows, dtype=torch.float64):
        found = recorded.run(draws=draws.tolist()).ids[:rows].tolist()
        assert found == launched.run(draws=draws.tolist()).ids[:rows].tolist()
        assert found == sample(at.logits[:rows].cpu(), cpu, draws, chosen).ids.tolist()
    for mine, theirs in zip(recorded.steps.sampler.tensors(), at.sampler.tensors(), strict=True):
        kept = slice(None) if mine.dim() == 1 else (slice(None), slice(-1))
        assert torch.equal(mine[kept], theirs[kept])


def test_kinds_of_settings_may_alternate(model: LoadedModel, graphs: list[CudaGraph]) -> None:
    prompts = prompts_of(model, 3)
    recorded, launched = (entered(model, prompts, launched=b) for b in (False, True))

    for step, kind in enumerate(["greedy", "default", "hot", "mixed"] * 5, 1):
        for slots in (recorded, launched):
            for slot in range(3):
                settings = KINDS[kind][slot % len(KINDS[kind])]
                ids = [*prompts[slot], *slots.sampled[slot]]
                with torch.inference_mode():
                    slots.steps.enter(slot, slots.pages[slot], ids, settings, None)
                slots.settings[slot] = settings
            slots.run()
        assert recorded.sampled == launched.sampled
        assert all(len(ids) == step for ids in recorded.sampled.values())

    assert len(graphs) == 4  # hot and mixed settings are of one kind


@pytest.mark.parametrize("places", [(0, 3, 1), (5, 0, 2), (7, 6, 4)], ids=str)
def test_slots_may_be_taken_in_any_order(
    model: LoadedModel, places: tuple[int, ...], graphs: list[CudaGraph]
) -> None:
    prompts = prompts_of(model, 3)
    recorded, launched = (
        entered(model, prompts, KINDS["mixed"], places=places, slots=8, launched=b)
        for b in (False, True)
    )

    for slots in (recorded, launched):
        slots.run(10)
        slots.move(places[0], 1 if 1 not in places else 4)
        slots.run(5)
        slots.enter(places[0], prompts[0], HOT)
        slots.run(5)

    assert graphs
    assert recorded.sampled == launched.sampled
    for slot in recorded.sampled:
        assert torch.equal(stacked(recorded, slot), stacked(launched, slot))


def test_recordings_share_memory(model: LoadedModel, graphs: list[CudaGraph]) -> None:
    slots = entered(model, prompts_of(model, 16))
    for settings in (GREEDY, HOT, SamplingSettings(top_k=100)):
        for slot in range(16):
            slots.settings[slot] = settings
        slots.run()

    assert len(graphs) == 4
    assert len({recording._graph.pool() for recording in graphs}) == 1


def test_a_recording_is_made_beside_texts(model: LoadedModel) -> None:
    prompts = prompts_of(model, 9)
    recorded, launched = (
        entered(model, prompts[:1], (HOT,), slots=16, launched=b) for b in (False, True)
    )

    for slots in (recorded, launched):
        for slot, ids in enumerate(prompts[1:], 1):
            slots.run(2)
            slots.enter(slot, ids, KINDS["mixed"][slot % 3])
        slots.run(2)

    # rows of the texts' recordings grow at the same steps as those of the launches
    assert recorded.sampled == launched.sampled


def test_greedy_text_is_that_of_full_passes(model: LoadedModel) -> None:
    ids = prompts_of(model, 8)[7]
    slots = entered(model, [ids])

    slots.run(30)

    with torch.inference_mode():
        whole = torch.tensor([ids + slots.sampled[0][:-1]], device=DEVICE)
        expected = model.decoder.forward(whole)[0, len(ids) - 1 :]
    bound = NEAR_TIE * float(expected.abs().max())
    torch.testing.assert_close(stacked(slots, 0), expected, rtol=0, atol=bound / 2)
    known = expected[:, : model.tokenizer.vocab_size]
    for logits, token in zip(known, slots.sampled[0], strict=True):
        assert float(logits.max() - logits[token]) < bound


def test_a_step_that_cannot_be_recorded_is_launched(
    tmp_path: Path, graphs: list[CudaGraph], caplog: pytest.LogCaptureFixture
) -> None:
    few = {"num_attention_heads": 8}  # of 8 dims each: no kernel attends to heads so small
    folder = make_tiny("llama", tmp_path / "source", **few)
    model = load_model(folder, device=DEVICE)
    prompts = prompts_of(model, 3)
    slots, launched = (entered(model, prompts, launched=b) for b in (False, True))

    for each in (slots, launched):
        each.run(10)

    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert "cannot be recorded and is launched" in caplog.text
    assert len(graphs) == 1  # sampling, which does not attend
    assert slots.sampled == launched.sampled


def test_greedy_texts_of_many_slots_are_those_of_each_alone(model: LoadedModel) -> None:
    """Launches depend on the rows: a text may diverge at a near-tie, and only there."""
    compared = 0
    prompts = prompts_of(model, 16)
    together = entered(model, prompts)
    together.run(30)
    for slot, ids in enumerate(prompts):
        alone = entered(model, [ids])
        alone.run(30)
        mine, other = together.sampled[slot], alone.sampled[0]
        differs = [place for place in range(30) if mine[place] != other[place]]
        until = differs[0] + 1 if differs else 30
        near = first_near_route(model, [*ids, *other[:-1]], len(ids) - 1)
        logits = stacked(alone, 0)
        if near is not None and near < until:
            differs, until = [], near
        compared += until
        bound = NEAR_TIE * float(logits.abs().max())
        torch.testing.assert_close(
            stacked(together, slot)[:until], logits[:until], rtol=0, atol=bound / 2
        )
        if differs:
            first, second = logits[until - 1, : model.tokenizer.vocab_size].topk(2).values
            assert float(first - second) < bound
    assert compared >= 30 * len(prompts) / 4


@pytest.mark.parametrize("settings", [GREEDY, SamplingSettings(), HOT], ids=str)
def test_texts_reuse_a_recording(
    model: LoadedModel, settings: SamplingSettings, graphs: list[CudaGraph]
) -> None:
    prompts = prompts_of(model, 4)
    fresh = []
    for ids in prompts:
        fresh.append(entered(model, [ids], (settings,)))
        fresh[-1].run(20, draws=[0.3])
    graphs.clear()
    slots = entered(model, prompts[:1], (settings,))

    for ids, expected in zip(prompts, fresh, strict=True):
        slots.enter(0, ids, settings)
        slots.run(20, draws=[0.3])
        assert slots.sampled[0] == expected.sampled[0]
        slots.enter(0, [5, 6], settings)
        slots.run(4)

    assert len(graphs) == 2


def test_a_model_is_used_on_one_stream(model: LoadedModel) -> None:
    generator = Generator(model, tokens=256, slots=1)

    with torch.cuda.stream(torch.cuda.Stream()):
        with pytest.raises(ConfigError, match="another CUDA stream"):
            generator.step()
        with pytest.raises(ConfigError, match="another CUDA stream"):
            Generator(model, tokens=256, slots=1)

    assert len(generator.generate([(5, 6)], max_new_tokens=3, stops=())) == 1


@torch.inference_mode()
@pytest.mark.parametrize("settings", [GREEDY, HOT, SamplingSettings(mirostat=True)])
def test_entering_a_slot_does_not_wait_for_the_device(
    model: LoadedModel,
    settings: SamplingSettings,
    without_waiting: Callable[[], AbstractContextManager[None]],
) -> None:
    steps = entered(model, prompts_of(model, 2), (settings,)).steps

    with without_waiting():
        steps.enter(0, [0], [2] * 100, completed(settings, model.tokenizer), None)
        steps.leave(1)

    assert steps.lengths.tolist() == [99, 0]
