"""Hidden states of texts for programs with a loop of their own, beside a generator's jobs."""

import random

import pytest
import torch
from adapters import make_adapter
from bounds import near, terms_of

from exl2flow.core.errors import CacheFull, ContextOverflow, SourceModelError
from exl2flow.engine.sampling import choose
from exl2flow.inference import (
    Adapter,
    Draft,
    Generator,
    LoadedModel,
    NgramDraft,
    Request,
    SamplingSettings,
)

GREEDY = SamplingSettings.greedy()


def texts(*lengths: int, seed: int = 0) -> list[tuple[int, ...]]:
    drawn = random.Random(seed)
    return [tuple(drawn.randrange(2, 299) for _ in range(length)) for length in lengths]


@torch.inference_mode()
def alone(model: LoadedModel, ids: tuple[int, ...], last: int) -> torch.Tensor:
    return model.decoder.hidden(torch.tensor([ids]))[0, -last:]


@pytest.mark.parametrize("last", [7, 700])
def test_states_are_those_of_a_pass_over_the_whole_text(model: LoadedModel, last: int) -> None:
    generator, given = Generator(model, tokens=2048, chunk=256), texts(300, 1, 600)

    for _ in range(2):  # the second time, from the cache
        for ids, found in zip(given, generator.states.hidden(*given, last=last), strict=True):
            expected = alone(model, ids, last)
            bound = near(expected, terms_of(model.spec, len(ids)))
            torch.testing.assert_close(found, expected, **bound)

    assert generator.states.hidden(())[0].shape == (0, 64)
    assert generator.free_pages == generator.pages


def test_hidden_states_of_cached_prefixes_are_not_computed_again(
    model: LoadedModel, monkeypatch
) -> None:
    generator, [ids] = Generator(model, tokens=1024), texts(400)
    generator.states.hidden(ids[:380])
    read, counts = generator._device_slots.read, list[int]()
    monkeypatch.setattr(
        generator._device_slots,
        "read",
        lambda ids, *a, **k: counts.append(len(ids)) or read(ids, *a, **k),
    )

    generator.states.hidden(ids, last=3)
    generator.states.hidden(ids[:390], last=3)
    generator.generate([ids], max_new_tokens=1, settings=GREEDY)

    assert counts == [20, 3]
    assert sum(page.ids == list(ids[256:]) for page in generator.states.table.pages) >= 1


@pytest.mark.parametrize("kind", ["draft", "ngram"])
def test_jobs_and_states_leave_each_other_alone(model: LoadedModel, kind: str) -> None:
    draft = Draft(model=model) if kind == "draft" else NgramDraft()
    generator, [ids, other] = Generator(model, tokens=2048, draft=draft), texts(270, 300)
    request = {"max_new_tokens": 30, "settings": GREEDY, "stops": ()}
    expected = Generator(model, tokens=2048).generate([ids], **request)

    [before] = generator.states.hidden(ids)
    made = ""
    for event in generator.stream(Request(ids, **request)):
        made += event.text
        [between] = generator.states.hidden(other, last=1)
    [after] = generator.states.hidden(ids)

    assert made == expected[0]
    bound = near(before, terms_of(model.spec, len(other)))
    torch.testing.assert_close(between, alone(model, other, 1), **bound)
    torch.testing.assert_close(after, before, **bound)
    assert generator.free_pages == generator.pages


def test_loop_over_hidden_states_gives_the_text_of_a_job(model: LoadedModel) -> None:
    generator, [ids] = Generator(model, tokens=1024), texts(20)
    settings = SamplingSettings(repetition_penalty=1.2, mirostat=True, dry_multiplier=0.5)
    request = {"settings": settings, "seed": 3, "stops": (), "max_new_tokens": 30}
    drawn, made, mu = random.Random(3), list(ids), None

    for _ in range(30):
        logits = model.decoder.head(generator.states.hidden(made)[0])
        draw = drawn.random()
        sampled, mu = choose(logits, settings, [made], [draw], model.tokenizer, mu=mu)
        made.append(int(sampled.ids))

    assert model.tokenizer.decode(made[20:]) == generator.generate([ids], **request)[0]


def test_adapters_change_states_and_share_no_pages(folder, model: LoadedModel, tmp_path) -> None:
    generator, [ids] = Generator(model, tokens=1024), texts(300)
    adapter = Adapter.load(make_adapter(tmp_path / "adapter", folder), model)
    [plain] = generator.states.hidden(ids)

    [changed] = generator.states.hidden(ids, adapters=(adapter,))

    assert (changed - plain).abs().max() > 1e-3
    bound = near(plain, terms_of(model.spec, len(ids)))
    torch.testing.assert_close(generator.states.hidden(ids)[0], plain, **bound)


def test_texts_without_room_or_of_other_ids_are_refused(model: LoadedModel) -> None:
    generator = Generator(model, tokens=512)
    for given, error in (
        (texts(1025), ContextOverflow),
        (texts(300, 300), CacheFull),
        ([(5, 999)], SourceModelError),
    ):
        with pytest.raises(error):
            generator.states.hidden(*given)

    assert generator.free_pages == generator.pages == 2
