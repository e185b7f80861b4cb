"""Decode steps of slots: what each promises its sequence, whatever the others do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import near, terms_of
from caches import FORMATS
from decoding import GREEDY, HOT, Slots, prompts_of, text_alone
from safetensors.torch import load_file, save_file
from small_pages import PAGE_TOKENS as SMALL_PAGE
from tiny import FAMILY_CONFIGS, make_tiny

from exl2flow.engine.sampling.bits import words_of
from exl2flow.inference import LoadedModel, SamplingSettings, load_model
from exl2flow.kernels import PAGE_TOKENS

EVERY = (GREEDY, SamplingSettings(temperature=1.5), HOT)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "olmo3": {  # a layer with a window and a rope of its own
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 10_000.0},
            "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0},
        },
    },
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder, family = tmp_path_factory.mktemp("model") / "tiny", request.param
    parent = family if family in FAMILY_CONFIGS else "llama"
    make_tiny(parent, folder, max_position_embeddings=512, config_form=4, **MODELS[family])
    return load_model(folder, device="cpu")


@torch.inference_mode()
def test_steps_are_full_passes(model: LoadedModel) -> None:
    ids = prompts_of(model)[3]
    slots = Slots(model, slots=2)
    slots.enter(1, ids)
    slots.run(12)

    whole = torch.tensor([ids + slots.sampled[1][:-1]])
    expected = model.decoder.forward(whole)[0, len(ids) - 1 :]

    bound = near(expected, terms_of(model.spec, whole.shape[1]))
    torch.testing.assert_close(torch.stack(slots.logits[1]), expected, **bound)
    known = expected[:, : model.tokenizer.vocab_size]
    assert slots.sampled[1] == known.argmax(-1).tolist()


@pytest.mark.parametrize("places", [(0, 1, 2, 3, 4), (7, 2, 0, 5, 3)], ids=str)
@pytest.mark.parametrize("settings", EVERY, ids=("greedy", "warm", "hot"))
def test_texts_do_not_depend_on_slots_and_neighbours(
    model: LoadedModel, settings: SamplingSettings, places: tuple[int, ...]
) -> None:
    prompts, slots = prompts_of(model), Slots(model, slots=8)
    for slot, ids in zip(places, prompts, strict=True):
        slots.enter(slot, ids, settings)

    slots.run(12)

    for slot, ids in zip(places, prompts, strict=True):
        alone = text_alone(model, ids, settings, 12)
        assert slots.sampled[slot] == alone.sampled[0]
        expected = torch.stack(alone.logits[0])
        bound = near(expected, terms_of(model.spec, len(ids) + 12))
        torch.testing.assert_close(torch.stack(slots.logits[slot]), expected, **bound)


def test_sequences_come_and_go_beside_others(model: LoadedModel) -> None:
    prompts, slots = prompts_of(model), Slots(model, slots=4)
    slots.enter(2, prompts[1], HOT)
    slots.run(3)
    slots.enter(0, prompts[0], GREEDY, cut=2)
    slots.run(3)
    slots.leave(0)
    slots.run(2)
    slots.enter(0, prompts[3])
    slots.run(4)

    assert slots.sampled[2] == text_alone(model, prompts[1], HOT, 12).sampled[0]
    assert slots.sampled[0] == text_alone(model, prompts[3], GREEDY, 4).sampled[0]


@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_idle_slots_write_to_the_spare_page_only(model: LoadedModel, name: str) -> None:
    prompts, slots = prompts_of(model), Slots(model, slots=6, name=name)
    slots.enter(0, prompts[0])
    slots.enter(3, prompts[4])
    slots.enter(5, prompts[3])
    slots.leave(3)
    stores = slots.cache.stores
    data = [rows.data for store in stores for rows in (store.keys, store.values)]
    for x in data:
        x[:] = 77
    before = [x.clone() for x in data]

    slots.run(3)

    new = {
        slots.pages[slot][0] * PAGE_TOKENS + len(prompts[index]) - 1 + step
        for slot, index in ((0, 0), (5, 3))
        for step in range(3)
    }
    for x, old in zip(data, before, strict=True):
        changed = {*(x != old).any(-1).nonzero()[:, 0].tolist()}
        assert changed == new | {slots.cache.spare * PAGE_TOKENS}


def test_idle_slots_keep_their_state(model: LoadedModel) -> None:
    prompts, slots = prompts_of(model), Slots(model, slots=4)
    slots.enter(3, prompts[0])
    slots.enter(1, prompts[1])
    slots.leave(1)

    slots.run(4)

    at = slots.steps
    assert at.lengths.tolist() == [0, 0, 0, len(prompts[0]) + 3]
    assert at.sampler.counts[3] == len(prompts[0]) + 4
    assert at.sampler.history[3, : len(prompts[0]) + 4].tolist() == prompts[0] + slots.sampled[3]
    assert int(at.ids[3, 0]) == slots.sampled[3][-1]
    assert at.sampler.history[0, :-1].eq(at.sampler.vocab_size).all()
    assert at.tables[:3].eq(slots.cache.spare).all()


@pytest.mark.parametrize("tokens", [6 * SMALL_PAGE, 6 * SMALL_PAGE - 5])
def test_all_positions_can_be_used_and_another_step_is_harmless(
    model: LoadedModel, tokens: int
) -> None:
    ids = prompts_of(model)[4]
    slots, roomy = (
        Slots(model, slots=2, tokens=count, page_tokens=SMALL_PAGE) for count in (tokens, 512)
    )
    for each in (slots, roomy):
        each.enter(0, ids)
        each.run(tokens - len(ids) + 1)  # the host may stop a sequence one step late

    assert slots.sampled[0][:-1] == roomy.sampled[0][:-1]
    assert int(slots.steps.lengths[0]) == tokens


@pytest.mark.parametrize("settings", EVERY, ids=("greedy", "warm", "hot"))
def test_a_sequence_moves_to_another_slot(model: LoadedModel, settings: SamplingSettings) -> None:
    prompts, slots = prompts_of(model), Slots(model, slots=6)
    slots.enter(5, prompts[1], settings)
    slots.enter(1, prompts[0])
    slots.run(3)

    slots.move(5, 0)
    slots.run(3)
    slots.move(1, 4)
    slots.run(3)

    assert slots.sampled[0] == text_alone(model, prompts[1], settings, 9).sampled[0]
    assert slots.sampled[4] == text_alone(model, prompts[0], GREEDY, 9).sampled[0]
    assert slots.steps.lengths.tolist() == [268, 0, 0, 0, 13, 0]
    assert slots.steps.sampler.active.tolist() == [1, 0, 0, 0, 1, 0]


@torch.inference_mode()
def test_a_pair_stays_a_pair_where_it_moves(model: LoadedModel) -> None:
    prompts, guided = prompts_of(model), SamplingSettings(temperature=1.5, cfg_scale=4.0)
    plain, moved = Slots(model, slots=4), Slots(model, slots=4)
    for slots in (plain, moved):
        slots.enter(2, prompts[0], guided)
        slots.enter(3, prompts[3], guided)
        slots.steps.sampler.pair(2, 3)
        slots.run(3)

    moved.move(2, 0)
    moved.move(3, 1)
    for slots in (plain, moved):
        slots.run(4)

    assert moved.sampled[0] == moved.sampled[1] == plain.sampled[2] == plain.sampled[3]
    assert moved.sampled[0] != text_alone(model, prompts[0], guided, 7).sampled[0]


@torch.inference_mode()
def test_another_id_takes_the_place_of_the_sampled_one(model: LoadedModel) -> None:
    ids, slots = prompts_of(model)[3], Slots(model, slots=3)
    slots.enter(1, ids)
    slots.run(2)
    first, second = slots.sampled[1]
    other = (second + 1) % model.tokenizer.vocab_size

    slots.steps.replace(1, len(ids) + 1, other)
    slots.run()

    expected = model.decoder.forward(torch.tensor([[*ids, first, other]]))[0, -1]
    bound = near(expected, terms_of(model.spec, len(ids) + 2))
    torch.testing.assert_close(slots.logits[1][-1], expected, **bound)
    third = slots.sampled[1][-1]
    history = slots.steps.sampler.history[1]
    assert history[: len(ids) + 3].tolist() == [*ids, first, other, third]


@torch.inference_mode()
def test_a_sequence_stands_back(model: LoadedModel) -> None:
    ids, slots = prompts_of(model)[3], Slots(model, slots=3)
    slots.enter(1, ids)
    slots.enter(0, ids)
    slots.run(6)
    made = slots.sampled[1][:]
    shorter = [*ids, *made[:2]]

    slots.steps.stand_at(1, shorter)
    slots.steps.sampler.cut(1, len(shorter))
    slots.run(4)

    assert slots.sampled[1][6:] == made[2:]
    assert slots.sampled[0] == text_alone(model, ids, GREEDY, 10).sampled[0]
    assert slots.steps.sampler.counts.tolist() == [len(ids) + 10, len(ids) + 6, 0]


@torch.inference_mode()
def test_pages_of_a_sequence_may_change(model: LoadedModel) -> None:
    slots, ids = Slots(model, slots=2), prompts_of(model)[1]
    slots.enter(0, ids[:200])
    slots.run(2)
    other = slots._free.pop()
    source, target = (torch.tensor([page]) for page in (slots.pages[0][0], other))
    for store in slots.cache.stores:
        store.copy_pages(source, target)

    slots.steps.set_pages(0, [other])
    slots.run(4)

    assert slots.sampled[0] == text_alone(model, ids[:200], GREEDY, 6).sampled[0]
    assert slots.steps.tables[0].tolist() == [other, slots.cache.spare]


@pytest.mark.parametrize("settings", EVERY, ids=("greedy", "warm", "hot"))
def test_logits_that_are_not_finite_touch_no_other_slot(
    model: LoadedModel, settings: SamplingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, slots = prompts_of(model), Slots(model, slots=3)
    for slot in range(3):
        slots.enter(slot, prompts[slot], settings)
    slots.run(2)
    head = model.decoder.head

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        logits[1] = torch.nan
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(model.decoder, "head", broken)
        slots.run()
    assert slots.sampled[1][-1] == -1
    slots.leave(1)
    slots.enter(1, prompts[3], settings)
    slots.run(3)

    for slot, ids in ((0, prompts[0]), (2, prompts[2])):
        assert slots.sampled[slot] == text_alone(model, ids, settings, 6).sampled[0]
    assert slots.steps.sampler.history[1, : len(prompts[3])].tolist() == prompts[3]


@torch.inference_mode()
def test_repetitions_and_unlikely_tokens_spare_the_tokenizers_ids(model: LoadedModel) -> None:
    slots, vocab = Slots(model, slots=3), model.spec.vocab_size
    tokenizer = model.tokenizer
    given = {"dry_breakers": (9,), "xtc_ignored": (8,)}
    slots.enter(0, [5, 6], SamplingSettings(dry_multiplier=0.8, xtc_probability=0.5))
    slots.enter(1, [5, 6], SamplingSettings(dry_multiplier=0.8, xtc_probability=0.5, **given))
    slots.run()

    sampler = slots.steps.sampler
    breaks = {
        token
        for token in range(tokenizer.vocab_size)
        if "\n" in tokenizer.decode([token]) or token in tokenizer.special_ids
    }
    for slot, ids in ((0, breaks), (1, given["xtc_ignored"])):
        assert torch.equal(sampler.late("ignored")[slot], words_of(ids, vocab))
    assert torch.equal(sampler.late("breakers")[1], words_of((9, sampler.vocab_size), vocab + 1))
    assert not torch.equal(sampler.late("breakers")[0], sampler.late("breakers")[1])


@pytest.mark.parametrize("rows", [290, 320])
def test_a_head_of_fewer_or_more_rows_than_the_vocabulary_is_sampled(
    rows: int, tmp_path: Path
) -> None:
    folder = make_tiny("llama", tmp_path / "tiny")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.randn(rows, 64)
    save_file(weights, folder / "model.safetensors")
    slots = Slots(load_model(folder, device="cpu"), slots=2, tokens=64)

    slots.enter(0, [5, 6])
    slots.run(3)

    assert all(0 <= token < rows for token in slots.sampled[0])
