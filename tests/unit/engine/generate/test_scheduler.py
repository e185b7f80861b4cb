"""`Scheduler`: who gets slots and pages, and who gives them back."""

import random
from collections.abc import Sequence

import pytest
import torch
from checkpoints import make_checkpoint
from small_pages import PAGE_TOKENS, small_generator
from tiny import TOKENIZER_SIZE

from exl2flow.engine.generate import scheduler as of_scheduler
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.generate.prompt_scorer import PromptScorer
from exl2flow.inference import (
    Event,
    Generator,
    Job,
    LoadedModel,
    Request,
    SamplingSettings,
    load_model,
)

GREEDY = SamplingSettings.greedy()
TOO_LONG = 3 * PAGE_TOKENS  # for what a running text leaves of four pages


def request(length: int, **more: object) -> Request:
    given = {"max_new_tokens": 8, "settings": GREEDY, "stops": (), **more}
    return Request(tuple(5 + i % 50 for i in range(length)), **given)


def running(generator: Generator, *lengths: int, tokens: int = 24) -> list[Job]:
    """Begin texts, one after the other, until all are decoded."""
    jobs = [generator.submit(request(n, max_new_tokens=tokens, tag=n)) for n in lengths]
    while not all(job.is_decoding for job in jobs):
        generator.step()
    return jobs


def end(generator: Generator) -> None:
    while not generator.is_idle:
        generator.step()


def table_of(generator: Generator, job: Job) -> list[int]:
    """Return the pages that the device uses for a text."""
    slots = generator._device_slots
    row: list[int] = slots.tables[job.lead.slot].tolist()
    return [page for page in row if page != slots.cache.spare]


def ids_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.ids]


def alone(model: LoadedModel, asked: Request) -> list[int]:
    return ids_of([*Generator(model, tokens=1024, slots=1).stream(asked)])


@pytest.fixture(scope="module")
def with_states(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_checkpoint("qwen3.5-text", tmp_path_factory.mktemp("model"))
    return load_model(folder, device="cpu", max_tokens=1024)


@pytest.fixture(params=["model", "with_states"])
def any_model(request: pytest.FixtureRequest) -> LoadedModel:
    loaded: LoadedModel = request.getfixturevalue(request.param)
    return loaded


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass over prompts has read."""
    seen, read = list[int](), DeviceSlots.read

    def noted(slots: DeviceSlots, ids: Sequence[int], *given: object, **more: object) -> object:
        seen.append(len(ids))
        return read(slots, ids, *given, **more)

    monkeypatch.setattr(DeviceSlots, "read", noted)
    return seen


@pytest.fixture
def four_pages(model: LoadedModel) -> Generator:
    return small_generator(model, tokens=4 * PAGE_TOKENS, slots=4)


def test_only_slots_of_decoded_texts_take_part_in_a_step(model: LoadedModel) -> None:
    generator = Generator(model, tokens=4096, slots=4)
    first, second = running(generator, 5, 6)

    assert generator._scheduler.top == 2
    second.is_decoding = False  # as while its prompt is read once more
    assert generator._scheduler.top == 1 + first.lead.slot


@pytest.mark.parametrize(("too_long", "is_started"), [(1, True), (2, False)])
def test_texts_that_do_not_fit_are_overtaken_as_far_as_the_scheduler_looks(
    four_pages: Generator, too_long: int, is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_scheduler, "LOOK_AHEAD", 2)
    running(four_pages, 20)

    waiting = [four_pages.submit(request(TOO_LONG, tag=i)) for i in range(too_long)]
    short = four_pages.submit(request(5))
    four_pages.step()

    assert (short in four_pages._scheduler.running) == is_started
    assert not {*waiting} & {*four_pages._scheduler.running}
    assert [job.skips for job in waiting] == [is_started] * too_long
    end(four_pages)


def test_a_text_that_ended_while_it_waited_holds_up_nobody(model: LoadedModel) -> None:
    generator = Generator(model, tokens=4096, slots=2)
    first, second = (generator.submit(request(n)) for n in (5, 6))
    first.cancel()

    generator.step()

    assert generator._scheduler.running == [second]


def test_a_slot_without_a_text_writes_to_no_page(model: LoadedModel) -> None:
    generator = Generator(model, tokens=4096, slots=2)
    *_, second = running(generator, 5, 6)

    generator.cancel(second)

    slots = generator._device_slots
    assert (slots.tables[1] == slots.cache.spare).all()
    assert slots.lengths[1] == 0


@pytest.mark.parametrize(("texts", "slots"), [(3, [0, 1]), (4, [1, 2, 3])])
def test_texts_move_to_lower_slots_if_a_smaller_batch_then_serves(
    texts: int, slots: list[int], model: LoadedModel
) -> None:
    generator = Generator(model, tokens=4096, slots=4)  # batches of 1, 2 and 4
    first, *others = running(generator, *range(5, 5 + texts))

    generator.cancel(first)
    generator.step()

    assert sorted(job.lead.slot for job in others) == slots


@pytest.mark.parametrize(("slots", "most"), [(2, 0), (5, 1), (2, 2), (5, None)])
def test_a_text_is_overtaken_as_often_as_it_allows(
    slots: int, most: int | None, model: LoadedModel
) -> None:
    generator = small_generator(model, tokens=8 * PAGE_TOKENS, slots=slots)
    running(generator, 20)
    ids = request(56).prompt
    pair = {"prompt": (ids, ids[::-1]), "settings": SamplingSettings.greedy(cfg_scale=1.5)}
    patient = generator.submit(Request(**pair, max_new_tokens=8, stops=(), max_skips=most))
    shorts = [generator.submit(request(5, max_new_tokens=1, tag=i)) for i in range(3)]
    for _ in range(12):
        generator.step()

    started = [job.is_done or job in generator._scheduler.running for job in shorts]
    assert started == [most is None or i < most for i in range(3)]
    assert patient.skips == sum(started)
    generator.cancel_all()


def test_a_prompt_takes_the_pages_of_the_youngest(four_pages: Generator) -> None:
    old, young = running(four_pages, 5, 6)
    scheduler = four_pages._scheduler

    assert scheduler.reserve(old, old.lead, 4 * PAGE_TOKENS)
    assert scheduler.running == [old]
    assert scheduler.preemptions == 1
    assert not scheduler.reserve(old, old.lead, 5 * PAGE_TOKENS)  # than there are
    assert scheduler.running == []
    assert scheduler.all() == [old, young]  # the last one to leave is first
    end(four_pages)


def test_draft_tokens_take_what_pages_are_left(four_pages: Generator) -> None:
    first, second = running(four_pages, PAGE_TOKENS - 6, 5)
    scheduler, length = four_pages._scheduler, len(first.lead.ids)

    assert scheduler.reserve_ahead(first, PAGE_TOKENS) == PAGE_TOKENS
    assert len(first.lead.held.pages) * PAGE_TOKENS >= length + PAGE_TOKENS
    assert table_of(four_pages, first) == first.lead.held.pages
    assert scheduler.reserve(second, second.lead, PAGE_TOKENS)
    taken = len(first.lead.held.pages)
    room = taken * PAGE_TOKENS - length
    assert scheduler.reserve_ahead(first, 4 * PAGE_TOKENS) == room  # the free pages are too few
    assert scheduler.reserve_ahead(first, room - 1) == room - 1
    assert len(first.lead.held.pages) == taken
    end(four_pages)


def test_scores_come_with_the_tokens_read_and_the_tag(model: LoadedModel) -> None:
    generator = Generator(model, tokens=1024)

    events = [*generator.stream(request(20, scores=1, max_new_tokens=0, tag="mine"))]

    [scored] = [event for event in events if event.scores is not None]
    assert (scored.stage, scored.tag) == ("prompt", "mine")
    assert (scored.read, scored.total) == (19, 19)
    assert [event.reason for event in events if event.reason] == ["max_new_tokens"]


def test_what_was_launched_is_read_before_a_text_goes_back(four_pages: Generator) -> None:
    old, young = running(four_pages, 5, 6)
    scheduler, caught_up = four_pages._scheduler, list[bool]()
    young.launched = 1

    def ends() -> None:
        caught_up.append(True)
        scheduler.end(young, young.output.finish("max_new_tokens"))

    scheduler.catch_up = lambda: ends
    scheduler.preempt(young)

    assert caught_up == [True]
    assert (young.is_done, scheduler.preemptions) == (True, 0)  # it has ended by itself
    assert scheduler.all() == [old]


def test_a_text_with_nothing_to_read_goes_back(four_pages: Generator) -> None:
    old, young = running(four_pages, 5, 6)
    scheduler = four_pages._scheduler
    young.launched, scheduler.catch_up = 1, lambda: None

    scheduler.preempt(young)

    assert (young.lead.slot, scheduler.preemptions) == (-1, 1)
    assert scheduler.all() == [old, young]


def test_what_was_decoded_stays_cached(model: LoadedModel) -> None:
    generator = Generator(model, tokens=4096, slots=2)
    first = generator.submit(request(20, max_new_tokens=24))
    end(generator)
    ids = (*first.prompt.sequences[0], *first.output.ids)

    [*_, last] = generator.stream(Request(ids, max_new_tokens=1, settings=GREEDY, stops=()))

    # the last token ended the text, and the one before it counts as read with the next
    assert last.statistics.cached_tokens == len(ids) - 2


def test_abandoned_texts_leave_no_page_and_no_slot(four_pages: Generator) -> None:
    free = four_pages.free_pages
    jobs = running(four_pages, 5, 6)
    waiting = four_pages.submit(request(7))
    scheduler = four_pages._scheduler

    assert scheduler.abandon() == [*jobs, waiting]
    assert scheduler.running == []
    assert four_pages.free_pages == free
    assert sorted(scheduler._free) == [0, 1, 2, 3]
    assert scheduler.is_idle


@pytest.mark.parametrize("need", ["step", "prompt"])
def test_the_youngest_goes_back_whoever_needs_a_page(need: str, model: LoadedModel) -> None:
    six_pages = small_generator(model, tokens=6 * PAGE_TOKENS, slots=3)
    old, middle, young = running(six_pages, 5, PAGE_TOKENS - 8, 6)
    scheduler = six_pages._scheduler
    assert scheduler.reserve(old, old.lead, 4 * PAGE_TOKENS)  # all that are left

    if need == "prompt":
        assert scheduler.reserve(old, old.lead, 5 * PAGE_TOKENS)
    while not scheduler.preemptions:
        six_pages.step()

    assert scheduler.running == [old, middle]
    assert scheduler.all() == [old, middle, young]
    six_pages.cancel_all()
    assert six_pages.free_pages == six_pages.pages


def test_a_text_that_went_back_goes_on_where_it_was(model: LoadedModel, passes: list[int]) -> None:
    generator = small_generator(model, tokens=1024, slots=1)
    [job] = running(generator, 20, tokens=20)
    while len(job.output.ids) < 10:
        generator.step()

    generator._scheduler.preempt(job)
    end(generator)

    assert passes == [19]  # nothing is read again
    assert len(job.output.ids) == 20


@pytest.mark.parametrize("is_mirostat", [True, False])
@pytest.mark.parametrize("is_decoding", [True, False])
def test_mirostat_goes_on_where_it_was(
    is_decoding: bool, is_mirostat: bool, model: LoadedModel
) -> None:
    settings = SamplingSettings(mirostat=is_mirostat, mirostat_eta=0.5)
    generator = Generator(model, tokens=1024, slots=2)
    job = generator.submit(request(5, settings=settings, max_new_tokens=40, seed=1))
    scheduler = generator._scheduler
    scheduler.admit()
    while is_decoding and len(job.output.ids) < 8:
        generator.step()

    scheduler.preempt(job)

    assert (job.mu is not None) == (is_decoding and is_mirostat)
    end(generator)
    asked = request(5, settings=settings, max_new_tokens=40, seed=1)
    assert job.output.ids == alone(model, asked)


def test_values_that_are_not_finite_are_not_shared(
    any_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = small_generator(any_model, tokens=512)
    asked = request(40, scores=1, max_new_tokens=0)
    with monkeypatch.context() as broken:
        broken.setattr(PromptScorer, "scores", lambda self: None)
        company = Request((60, 61, 62), max_new_tokens=1)
        events = [*generator.stream(asked, company)]
    [failed] = [event for event in events if event.error is not None]
    assert str(failed.error) == "the logits are not finite; check the files of the model"
    assert failed.reason == "error"
    store = generator._scheduler.states.store
    assert store is None or store.nbytes == 0

    [*_, last] = generator.stream(request(40, max_new_tokens=1))

    assert last.statistics.cached_tokens == 0


def with_cuts(generator: Generator, asked: Request) -> tuple[list[Event], list[tuple[int, int]]]:
    """Return the events of a text, and where which token was taken back."""
    events, cuts = list[Event](), list[tuple[int, int]]()

    def note(event: Event) -> None:
        events.append(event)
        if event.suppressed_ids:
            cuts.append((len(job.output.ids), event.suppressed_ids[0]))

    job = generator.submit(asked, deliver=note)
    end(generator)
    return events, cuts


BANS = ("a", "e", "5")


def test_a_text_that_was_cut_goes_on_from_what_is_left(
    any_model: LoadedModel, passes: list[int]
) -> None:
    source = random.Random(0)
    prompt = tuple(source.randrange(5, TOKENIZER_SIZE) for _ in range(20))
    options = {"settings": GREEDY, "stops": (), "logits": True}
    asked = Request(prompt, max_new_tokens=24, banned_strings=BANS, **options)

    events, cuts = with_cuts(Generator(any_model, tokens=1024, slots=1), asked)

    ids = ids_of(events)
    assert cuts
    assert passes == [19]  # what was left is not read again
    logits = [row for event in events if event.ids for row in event.logits]
    for at, token in cuts[:3]:
        fresh = Generator(any_model, tokens=1024, slots=1)
        again = Request((*prompt, *ids[:at]), max_new_tokens=1, excluded={token}, **options)
        [first] = [event for event in fresh.stream(again) if event.ids]
        torch.testing.assert_close(logits[at], first.logits[0], rtol=0, atol=1e-4)


def test_a_text_that_is_cut_while_no_page_is_free_is_read_again(model: LoadedModel) -> None:
    generator = small_generator(model, tokens=2 * PAGE_TOKENS, slots=1)
    [job] = running(generator, PAGE_TOKENS - 6, tokens=12)
    scheduler, others = generator._scheduler, [job.new_pages(), job.new_pages()]
    pool = scheduler.page_pool
    assert pool.reserve(others[0], 1)
    while len(job.lead.ids) <= PAGE_TOKENS:
        generator.step()
    scheduler._settle(job.lead)
    assert pool.share(others[1], job.lead.ids)  # the full page

    del job.output.ids[3:]
    scheduler.advance(job)

    assert (job.is_decoding, job.lead.held.filled, job.lead.slot) == (False, 0, 0)
    for held in others:
        pool.release(held)
    end(generator)
    assert job.output.ids == alone(model, request(PAGE_TOKENS - 6, max_new_tokens=12))


def test_a_text_that_is_cut_before_its_states_is_read_again(with_states: LoadedModel) -> None:
    generator = Generator(with_states, tokens=1024, slots=2)
    [job] = running(generator, 20, tokens=60)
    while len(job.output.ids) < 40:
        generator.step()

    del job.output.ids[3:]
    generator._scheduler.advance(job)

    assert (job.is_decoding, job.lead.held.filled) == (False, 0)
    assert generator._device_slots.lengths[job.lead.slot] == 0  # steps leave it out
    end(generator)
    assert job.output.ids == alone(with_states, request(20, max_new_tokens=60))


def test_one_token_that_lost_its_page_is_read_again(model: LoadedModel) -> None:
    generator = small_generator(model, tokens=3 * PAGE_TOKENS, slots=1)
    [job] = running(generator, PAGE_TOKENS + 1, tokens=PAGE_TOKENS + 2)
    scheduler, others = generator._scheduler, [job.new_pages(), job.new_pages()]
    assert scheduler.page_pool.reserve(others[0], 1)
    while len(job.lead.ids) <= 2 * PAGE_TOKENS:
        generator.step()
    scheduler._settle(job.lead)
    assert scheduler.page_pool.share(others[1], job.lead.ids)  # both full pages

    del job.output.ids[1:]
    scheduler.advance(job)

    assert (job.is_decoding, job.lead.held.filled, job.lead.unread) == (False, PAGE_TOKENS, 1)
    for held in others:
        scheduler.page_pool.release(held)
    end(generator)
    asked = request(PAGE_TOKENS + 1, max_new_tokens=PAGE_TOKENS + 2)
    assert job.output.ids == alone(model, asked)


def test_a_text_that_is_cut_within_a_page_of_others_gets_its_own(model: LoadedModel) -> None:
    generator = small_generator(model, tokens=4 * PAGE_TOKENS, slots=1)
    [job] = running(generator, PAGE_TOKENS - 6, tokens=12)
    scheduler, other = generator._scheduler, job.new_pages()
    while len(job.lead.ids) <= PAGE_TOKENS:
        generator.step()
    scheduler._settle(job.lead)
    assert scheduler.page_pool.share(other, job.lead.ids)

    del job.output.ids[3:]
    scheduler.advance(job)

    assert (job.is_decoding, job.lead.unread) == (True, 0)
    assert table_of(generator, job) == job.lead.held.pages
    assert job.lead.held.pages[0] != other.pages[0]
    scheduler.page_pool.release(other)
    end(generator)
    assert job.output.ids == alone(model, request(PAGE_TOKENS - 6, max_new_tokens=12))


@pytest.mark.parametrize("length", [PAGE_TOKENS - 12, PAGE_TOKENS - 6])
def test_a_text_takes_a_page_when_it_writes_to_it(length: int, model: LoadedModel) -> None:
    generator = small_generator(model, tokens=4 * PAGE_TOKENS, slots=1)
    [job] = running(generator, length, tokens=PAGE_TOKENS + 1 - length)

    while not generator.is_idle:
        written = len(job.lead.ids) - 1
        assert len(job.lead.held.pages) == -(-written // PAGE_TOKENS)
        generator.step()

    assert len(job.output.ids) == PAGE_TOKENS + 1 - length


def test_a_text_takes_no_page_behind_its_last_token(model: LoadedModel) -> None:
    generator = small_generator(model, tokens=4 * PAGE_TOKENS, slots=1)
    [job] = running(generator, PAGE_TOKENS - 6, tokens=7)
    scheduler, taken = generator._scheduler, len(job.lead.held.pages)

    job.launched = job.output.max_new_tokens - job.output.new_tokens  # as ahead of a GPU
    scheduler.reserve_pages()

    assert len(job.lead.ids) + job.launched > taken * PAGE_TOKENS
    assert len(job.lead.held.pages) == taken
    job.launched = 0
    end(generator)


def test_what_was_taken_back_is_not_penalized(model: LoadedModel) -> None:
    settings = SamplingSettings.greedy(frequency_penalty=4.0)
    generator = Generator(model, tokens=1024, slots=1)
    job = generator.submit(request(5, settings=settings, max_new_tokens=30))
    while len(job.output.ids) < 15:
        generator.step()

    del job.output.ids[3:]
    generator._scheduler.advance(job)

    end(generator)
    assert job.output.ids == alone(model, request(5, settings=settings, max_new_tokens=30))


@pytest.mark.parametrize("slots", [(0, 1), (1, 0)])
def test_equal_texts_share_the_pages_that_they_fill(
    slots: tuple[int, int], model: LoadedModel
) -> None:
    generator = small_generator(model, tokens=8 * PAGE_TOKENS, slots=2)
    for _ in range(slots[0]):
        generator.submit(request(3, max_new_tokens=1))  # leaves the lowest slot to the second
    jobs = running(generator, PAGE_TOKENS - 6, PAGE_TOKENS - 6)
    assert tuple(job.lead.slot for job in jobs) == slots
    first, second = (job.lead.held.pages for job in jobs)
    assert first[0] != second[0]  # a copy as long as it is not full

    while min(len(job.lead.ids) for job in jobs) < 2 * PAGE_TOKENS:
        generator.step()

    assert first[0] == second[0]
    for job in jobs:
        assert table_of(generator, job) == job.lead.held.pages
    generator.cancel_all()
    assert generator.free_pages == generator.pages


def test_an_answer_leaves_its_state_behind(with_states: LoadedModel) -> None:
    generator = small_generator(with_states, tokens=512, slots=1)
    first = generator.submit(request(20, max_new_tokens=PAGE_TOKENS + 10))
    end(generator)
    ids = (*first.prompt.sequences[0], *first.output.ids)

    [*_, last] = generator.stream(Request(ids, max_new_tokens=1, settings=GREEDY, stops=()))

    assert last.statistics.cached_tokens == 2 * PAGE_TOKENS
