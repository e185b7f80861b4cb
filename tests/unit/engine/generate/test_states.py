"""Snapshots of states: how far a beginning is taken over, and what is refused."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from guesses import Guesses
from small_pages import DELTA_PAGE_TOKENS as PAGE_TOKENS
from small_pages import small_generator
from tiny import TOKENIZER_SIZE, make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.engine.cache.paged import PagedCache
from exl2flow.engine.drafts import DraftRequest
from exl2flow.engine.generate import sequence_states
from exl2flow.inference import (
    Draft,
    Generator,
    LoadedModel,
    PromptCache,
    Request,
    SamplingSettings,
    load_model,
)
from exl2flow.kernels import CACHE_FORMATS, STEP_TOKENS
from exl2flow.model import resolve
from exl2flow.model.memory.footprint import Footprint, cache_bytes

GREEDY = SamplingSettings.greedy()
LONG, CHUNK = 40 * PAGE_TOKENS, 4 * PAGE_TOKENS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3.5-text", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder, device="cpu", max_tokens=LONG + 1024)


def prompt(seed: int, tokens: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(5, TOKENIZER_SIZE) for _ in range(tokens))


def small(model: LoadedModel, **options: Any) -> Generator:
    return small_generator(model, page_tokens=PAGE_TOKENS, **options)


def run(generator: Generator, ids: tuple[int, ...], *, new: int = 4) -> tuple[list[int], int]:
    """Return a text's ids, and how many tokens of its prompt were read."""
    request = Request(ids, max_new_tokens=new, settings=GREEDY, stops=(), end_loops=False)
    events = [*generator.stream(request)]
    statistics = events[-1].statistics
    assert statistics is not None
    read = statistics.prompt_tokens - statistics.cached_tokens
    return [token for event in events for token in event.ids], read


def test_a_long_beginning_is_taken_over_with_another_end(model: LoadedModel) -> None:
    generator = small(model, slots=1, chunk=CHUNK)
    beginning = prompt(0, LONG)
    run(generator, beginning)

    for seed in (1, 2):
        ids = beginning[: LONG - 2 * CHUNK] + prompt(seed, CHUNK)
        found, read = run(generator, ids)

        assert read <= 2 * CHUNK + PAGE_TOKENS
        assert found == run(small(model, slots=1), ids)[0]


@dataclass
class Known(Guesses):
    """Proposes how a text goes on, with another token in each place in turn, then in none."""

    text: list[int]
    proposals: int = 0
    tokens = STEP_TOKENS - 1

    def guess(self, request: DraftRequest) -> list[int]:
        begin, wrong = len(request.ids), self.proposals % STEP_TOKENS
        self.proposals += 1
        known = self.text[begin : begin + request.limit]
        return [token + (place == wrong) for place, token in enumerate(known)]


@pytest.mark.usefixtures("eager")
def test_texts_do_not_depend_on_how_many_tokens_a_step_takes_back(model: LoadedModel) -> None:
    ids, new = prompt(3, PAGE_TOKENS - 5), 3 * PAGE_TOKENS
    expected, _ = run(small(model, slots=1), ids, new=new)
    known = Known([*ids, *expected])
    generator = small(model, slots=1, draft=known)

    assert run(generator, ids, new=new)[0] == expected
    assert STEP_TOKENS < known.proposals < new // 4

    beginning = (*ids, *expected)[: 3 * PAGE_TOKENS + 7]
    found, read = run(generator, (*beginning, 9))
    assert read <= PAGE_TOKENS + 8
    assert found == run(small(model, slots=1), (*beginning, 9))[0]


def test_snapshots_stay_within_their_memory_and_are_not_used_without_pages(
    model: LoadedModel,
) -> None:
    tokens = 5 * PAGE_TOKENS
    generator = small(model, tokens=4 * tokens, slots=1, keep=PromptCache(states=300_000))
    scheduler = generator._scheduler
    store = scheduler.states.store
    assert store is not None
    size, most = store._states.saved_bytes, 0
    for seed in range(24):
        ids = prompt(seed % 9, tokens - 40)
        assert run(generator, ids)[0] == run(small(model, slots=1), ids)[0]
        most = max(most, len(store._saved))
        assert store.nbytes <= 300_000
    assert most == 300_000 // size

    scheduler.page_pool.clear()

    assert run(generator, prompt(0, tokens - 40))[1] == tokens - 40


def test_answers_leave_snapshots_and_regenerating_goes_on_at_the_prompts_last_border(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_states, "OUTPUT_TOKENS", 2 * PAGE_TOKENS)
    generator, asked = small(model, slots=1), prompt(0, 175)
    text, read = run(generator, asked, new=312)
    assert read == 175

    again, read = run(generator, asked, new=5)
    assert (again, read) == (text[:5], 175 - 2 * PAGE_TOKENS)

    _, read = run(generator, (*asked, *text, 7))
    assert read < 2 * PAGE_TOKENS

    store = generator._scheduler.states.store
    assert store is not None
    assert len(store._saved) == 4  # the prompt's, two within the answer, and its end


def test_equal_prompts_wait_for_each_other(model: LoadedModel) -> None:
    generator, ids = small(model, tokens=2048, slots=3), prompt(0, 375)
    jobs = [
        generator.submit(Request(ids, max_new_tokens=2, settings=GREEDY, tag=tag, stops=()))
        for tag in range(3)
    ]
    while not generator.is_idle:
        generator.step()
    read = [job.statistics().prompt_tokens - job.statistics().cached_tokens for job in jobs]
    assert sorted(read) == [375 % PAGE_TOKENS] * 2 + [375]


def test_hidden_states_go_on_behind_snapshots(model: LoadedModel) -> None:
    generator, ids = small(model, tokens=2048, slots=1), prompt(3, 225)
    whole = generator.states.hidden(ids, prompt(4, 70), last=2)

    run(generator, prompt(5, 75))
    again = generator.states.hidden(ids, prompt(4, 70), last=2)

    for first, second in zip(whole, again, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-5)
    expected = model.decoder.hidden(torch.tensor([ids]))[0, -2:]
    torch.testing.assert_close(whole[0], expected, rtol=0, atol=1e-4)


def test_what_states_cannot_do_is_refused(model: LoadedModel, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layers with a state, so pages cannot be kept"):
        Generator(model, keep=PromptCache(disk=tmp_path / "pages"))
    with pytest.raises(ConfigError, match="it drafts nothing; use n-grams"):
        Generator(model, draft=Draft(model=model))
    plain = load_model(make_tiny("llama", tmp_path / "plain"), device="cpu")
    assert plain.decoder.placement.head.type == "cpu"
    assert Generator(plain)._scheduler.states.store is None


@pytest.mark.parametrize("slots", [1, 4])
def test_states_are_counted_as_they_are_reserved(folder: Path, slots: int) -> None:
    spec = resolve(folder)

    cache = PagedCache(spec, pages=2, form=CACHE_FORMATS["fp16"], device="meta", slots=slots)

    needs = Footprint.of(spec, context=512, cache_format="fp16")
    assert (
        needs.cache
        == PagedCache(spec, pages=2, form=CACHE_FORMATS["fp16"], device="meta", slots=1).nbytes
    )
    pages = sum(store.nbytes for store in cache.stores)
    assert cache.states is not None
    assert cache.nbytes - pages == cache.states.nbytes
    one = cache_bytes(spec, context=512, cache_format="fp16") - pages * 2 // 3
    assert cache.states.nbytes * 2 == one * (slots + 1)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_piece_of_a_prompt_that_runs_out_of_memory_is_in_the_state_once(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    ids = prompt(3, 2 * PAGE_TOKENS + 40)
    expected = run(small(model, slots=1, chunk=PAGE_TOKENS), ids)[0]
    last, passes = [s for s in model.decoder.sublayers if hasattr(s, "fill")][-1], list[int]()
    plain = type(last).fill

    def fill(self: object, *given: object, **named: object) -> object:
        if self is last:
            passes.append(1)
            if len(passes) == fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, *given, **named)

    monkeypatch.setattr(type(last), "fill", fill)
    generator = small(model, slots=1, chunk=PAGE_TOKENS)

    assert run(generator, ids)[0] == expected
    assert len(passes) == 4
    # nor is it in the snapshots that others start from
    assert (
        run(generator, (*ids[: 2 * PAGE_TOKENS], 9, 8, 7))[0]
        == (run(small(model, slots=1), (*ids[: 2 * PAGE_TOKENS], 9, 8, 7))[0])
    )


def test_a_piece_whose_snapshot_is_gone_is_read_from_the_beginning(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, reads = prompt(4, 2 * PAGE_TOKENS + 40), list[int]()
    expected = run(small(model, slots=1), ids)[0]
    generator = small(model, slots=1, chunk=PAGE_TOKENS, keep=PromptCache(states=0))
    plain = generator._device_slots.read

    def read(tokens: list[int], *given: object, **named: object) -> torch.Tensor:
        reads.append(len(tokens))
        found = plain(tokens, *given, **named)
        if len(reads) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(generator._device_slots, "read", read)

    assert run(generator, ids)[0] == expected
    assert reads == [PAGE_TOKENS] * 4 + [39]


def test_a_text_cut_to_a_prompt_of_one_token_forgets_the_state_of_what_was_cut(
    model: LoadedModel,
) -> None:
    ids, plain = (7,), run(small(model, slots=1), (7,), new=12)[0]
    ban = model.tokenizer.decode(plain[:3])
    request = Request(
        ids, max_new_tokens=12, settings=GREEDY, stops=(), banned_strings=(ban,), end_loops=False
    )
    expected = [token for e in small(model, slots=1).stream(request) for token in e.ids]
    generator, found = small(model, slots=1), list[int]()
    job, preempted = generator.submit(request, deliver=lambda e: found.extend(e.ids)), False
    while not generator.is_idle:
        generator.step()
        if not preempted and job.is_decoding and job.output.may_rewind:
            generator._scheduler.preempt(job)
            preempted = True

    assert preempted
    assert found == expected != plain
