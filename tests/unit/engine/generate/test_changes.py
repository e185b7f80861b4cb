"""Jobs whose settings, stops and exclusions change on the way, also while steps run ahead."""

from collections.abc import Callable

import pytest

from exl2flow.core.errors import ConfigError, InferenceError
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.inference import Event, Generator, Job, LoadedModel, Request, SamplingSettings

GREEDY = SamplingSettings.greedy()
PROMPT = (40, 41, 42, 43)
COUNT = 12


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"], autouse=True)
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the device works while the host reads, as a GPU does."""
    monkeypatch.setattr(DeviceSlots, "is_asynchronous", property(lambda _: request.param))
    return request.param


def changed(
    model: LoadedModel, change: Callable[[Generator, Job], object], *, behind: int, **fields: object
) -> list[int]:
    """Return the ids of a text in which `change` is called behind so many tokens."""
    generator, events = Generator(model, tokens=1024, slots=2), list[Event]()
    given = {"settings": GREEDY, "stops": (), "max_new_tokens": COUNT} | fields
    job = generator.submit(Request(PROMPT, **given), deliver=events.append)
    while len(job.output.ids) < behind:
        generator.step()
    change(generator, job)
    while not generator.is_idle:
        generator.step()
    assert generator.free_pages == generator.pages
    return [token for event in events for token in event.ids]


def test_excluded_ids_apply_to_the_next_token(model: LoadedModel) -> None:
    free = changed(model, lambda *_: None, behind=0)

    for behind in (1, 4, 5):
        ids = frozenset([free[behind]])
        by_job = changed(model, lambda _, job, i=ids: job.exclude(i), behind=behind)
        by_field = changed(model, lambda g, job, i=ids: g.change(job, excluded=i), behind=behind)

        assert by_job == by_field
        assert by_job[:behind] == free[:behind]
        assert not ids & {*by_job[behind:]}
        assert len(by_job) == COUNT


def test_a_change_to_the_same_values_changes_no_text(model: LoadedModel) -> None:
    hot = SamplingSettings(temperature=1.5, repetition_penalty=1.2)
    cold = SamplingSettings(temperature=1.4, repetition_penalty=1.2)
    given = {"settings": hot, "seed": 3, "probabilities": True}

    free = changed(model, lambda *_: None, behind=0, **given)
    again = changed(model, lambda _, job: job.exclude(frozenset()), behind=5, **given)

    def there_and_back(generator: Generator, job: Job) -> None:
        generator.change(job, settings=cold)
        generator.change(job, settings=hot)

    assert again == free
    assert changed(model, there_and_back, behind=5, **given) == free


@pytest.mark.parametrize("seed", range(3))
def test_a_discarded_sample_teaches_mirostat_nothing(model: LoadedModel, seed: int) -> None:
    settings = SamplingSettings(temperature=1.5, top_k=0, top_p=0.0, mirostat=True)
    given = {"settings": settings, "seed": seed, "max_new_tokens": 40}

    free = changed(model, lambda *_: None, behind=0, **given)

    assert changed(model, lambda _, job: job.exclude(frozenset()), behind=4, **given) == free
    assert changed(model, lambda g, job: g.change(job, stops=()), behind=4, **given) == free


def test_settings_apply_to_the_next_token(model: LoadedModel) -> None:
    free = changed(model, lambda *_: None, behind=0)
    bias = SamplingSettings.greedy(token_bias=((50, 1000.0),))

    found = changed(model, lambda g, job: g.change(job, settings=bias), behind=4)

    assert found == [*free[:4], *[50] * (COUNT - 4)]


def test_stops_apply_to_the_next_token(model: LoadedModel) -> None:
    free = changed(model, lambda *_: None, behind=0)

    by_id = changed(model, lambda g, job: g.change(job, stops=[free[4]]), behind=4)
    lifted = changed(model, lambda g, job: g.change(job, stops=()), behind=4, stops=[free[4]])

    assert by_id == free[:4]
    assert lifted == free


def test_a_change_that_is_refused_changes_nothing(model: LoadedModel) -> None:
    free = changed(model, lambda *_: None, behind=0)

    def refused(generator: Generator, job: Job) -> None:
        with pytest.raises(InferenceError, match="vocabulary"):
            generator.change(job, stops=[10**6])
        with pytest.raises(ConfigError, match="cfg_scale"):
            generator.change(job, settings=SamplingSettings(cfg_scale=2.0))

    assert changed(model, refused, behind=4) == free


def test_a_cancelled_job_frees_its_pages_without_another_step(model: LoadedModel) -> None:
    generator = Generator(model, tokens=1024, slots=2)
    jobs = [generator.submit(Request(PROMPT, max_new_tokens=50, stops=())) for _ in range(3)]
    for _ in range(4):
        generator.step()

    for job in jobs:
        generator.cancel(job)

    assert generator.is_idle
    assert generator.free_pages == generator.pages
    assert [event.reason for event in generator.step()] == ["cancelled"] * 3
