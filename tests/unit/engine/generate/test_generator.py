"""`Generator` on a tiny model: the same text whoever else is there, and nothing lost."""

import gc
import math
import random
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from bounds import moved_share, near, terms_of
from decoding import RICH
from small_pages import PAGE_TOKENS, is_empty, small_generator
from tiny import VOCAB_SIZE
from transformers import AutoModelForCausalLM

from exl2flow.core.errors import CacheFull, ConfigError, ContextOverflow, InferenceError
from exl2flow.core.requests.request import Sampled
from exl2flow.inference import (
    Event,
    Generator,
    Job,
    LoadedModel,
    Request,
    SamplingSettings,
    load_model,
)
from exl2flow.kernels import CACHE_FORMATS

GREEDY = SamplingSettings.greedy()
HOT = SamplingSettings(temperature=2.0, top_k=0, top_p=0.0)


def prompts(count: int, *, least: int = 2, most: int = 40, seed: int = 0) -> list[tuple[int, ...]]:
    source = random.Random(seed)
    return [
        tuple(source.randrange(3, VOCAB_SIZE) for _ in range(source.randint(least, most)))
        for _ in range(count)
    ]


def requests(count: int, *, tokens: int = 24, settings: SamplingSettings = GREEDY, **more: object):
    return [
        Request(ids, max_new_tokens=tokens, settings=settings, seed=i, stops=(), tag=i, **more)
        for i, ids in enumerate(prompts(count))
    ]


def ids_of(events: list[Event]) -> dict[object, tuple[int, ...]]:
    found: dict[object, tuple[int, ...]] = {}
    for event in events:
        found[event.tag] = found.get(event.tag, ()) + event.ids
    return found


def changed_by(model: LoadedModel, cache: str, texts: list[tuple[int, ...]]) -> float:
    """Return what sums in another order change in a logit, for texts in such a cache.

    They seldom move an element of the cache by a step. Storing all in steps changes `most`; errors
    of random sign add in quadrature, so a share of them, or a single one, changes √share · most.
    """
    spec, form = model.spec, CACHE_FORMATS[cache]
    terms = terms_of(spec, max(map(len, texts)))
    given = (Generator(model, cache=name, tokens=16384).states for name in (cache, "fp32"))
    stored, exact = (
        model.decoder.head(torch.cat(states.hidden(*texts, last=model.max_tokens)))
        for states in given
    )
    most = float((stored - exact).abs().max())
    elements = min(map(len, texts)) * sum(2 * x.num_kv_heads * x.head_dim for x in spec.attentions)
    share = max(moved_share(x, terms) for x in (form.keys, form.values)) + 1 / elements
    return near(exact, terms)["atol"] + math.sqrt(share) * most


@torch.inference_mode()
def check_same(model: LoadedModel, cache: str, found: list[Event], expected: list[Event]) -> None:
    """Compare greedy texts up to a token that is as likely as the expected one, but for sums."""
    texts = ids_of(expected)
    bound = changed_by(model, cache, [*texts.values()])
    assert ids_of(found).keys() == texts.keys()
    for tag, ids in ids_of(found).items():
        assert len(ids) == len(texts[tag])
        logits = [row for event in expected if event.tag == tag for row in event.logits]
        for mine, theirs, row in zip(ids, texts[tag], logits, strict=True):
            assert row[theirs] - row[mine] <= bound, (tag, mine, theirs)
            if mine != theirs:
                break


def test_greedy_text_is_that_of_transformers(folder: Path, model: LoadedModel) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = ids_of([*Generator(model, tokens=4096, slots=3).stream(*requests(4, tokens=32))])

    for i, ids in enumerate(prompts(4)):
        expected = reference.generate(
            torch.tensor([ids]),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=[*range(model.tokenizer.vocab_size, VOCAB_SIZE)],
        )
        assert list(made[i]) == expected[0, len(ids) :].tolist()


def test_text_is_the_same_alone_and_in_any_company(model: LoadedModel) -> None:
    every = [
        replace(one, settings=(GREEDY, HOT, RICH)[i % 3])
        for i, one in enumerate(requests(14, tokens=16))
    ]
    together = ids_of([*Generator(model, tokens=16384, slots=16).stream(*every)])
    reordered = ids_of([*Generator(model, tokens=16384, slots=8).stream(*reversed(every))])
    lonely = Generator(model, tokens=1024, slots=1)

    assert together == reordered
    assert all(ids_of([*lonely.stream(r)])[r.tag] == together[r.tag] for r in every)


@pytest.mark.parametrize(
    ("cache", "settings"), [("fp32", RICH), pytest.param("q4", GREEDY, marks=pytest.mark.slow)]
)
def test_jobs_that_were_sent_back_go_on_where_they_were(
    model: LoadedModel, cache: str, settings: SamplingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = requests(4, tokens=20, settings=settings, logits=True)
    roomy = [*Generator(model, cache=cache, tokens=8192, slots=4).stream(*every)]
    cramped = small_generator(model, cache=cache, tokens=5 * PAGE_TOKENS, slots=4)
    preempted, preempt = list[Job](), cramped._scheduler.preempt
    monkeypatch.setattr(
        cramped._scheduler, "preempt", lambda job: (preempted.append(job), preempt(job))
    )

    found = [*cramped.stream(*every)]

    if cache == "fp32":
        assert ids_of(found) == ids_of(roomy)
    else:
        check_same(model, cache, found, roomy)
    assert len(preempted) >= 2
    assert is_empty(cramped)


@pytest.mark.parametrize("cache", ["fp32", "q8"])
def test_texts_do_not_depend_on_the_size_of_pages(model: LoadedModel, cache: str) -> None:
    every = requests(4, tokens=16)
    large = ids_of([*Generator(model, cache=cache, tokens=1024, slots=4).stream(*every)])

    for count in (5, PAGE_TOKENS):
        generator = Generator(
            model, cache=cache, tokens=300, slots=4, page_tokens=count, chunk=20 * count
        )
        assert (generator.page_tokens, generator.pages) == (count, -(-300 // count))
        assert ids_of([*generator.stream(*every)]) == large
    assert Generator.page_tokens == Generator(model, tokens=300).page_tokens == 256


def test_pages_without_tokens_and_chunks_of_broken_pages_are_refused(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="`page_tokens` is 0; give 1 or more"):
        Generator(model, page_tokens=0)
    with pytest.raises(ConfigError, match="a chunk that is a multiple of 24"):
        Generator(model, page_tokens=24, chunk=32)


def test_number_of_tokens_is_exact_and_fills_the_context(model: LoadedModel) -> None:
    generator = small_generator(model, tokens=2048, slots=2)

    for count in (1, 2, 15, 16, 17):
        [*_, last] = generator.stream(Request((5, 6, 7), max_new_tokens=count, stops=()))
        assert last.statistics.new_tokens == count
    [*_, last] = generator.stream(Request((5,) * 1000, stops=()))

    assert last.reason == "max_new_tokens"
    assert last.statistics.new_tokens == 24  # of a context of 1,024


def test_a_prompt_seen_before_is_not_read_again(model: LoadedModel) -> None:
    generator = small_generator(model, tokens=512, slots=4)
    ids = prompts(1, least=44, most=44)[0]
    first = [*generator.stream(Request(ids, max_new_tokens=8, settings=GREEDY, stops=()))]

    again = [*generator.stream(Request(ids, max_new_tokens=8, settings=GREEDY, stops=()))]

    assert first[-1].statistics.cached_tokens == 0
    assert again[-1].statistics.cached_tokens == 43
    assert ids_of(again) == ids_of(first)


def test_a_common_beginning_is_read_once(model: LoadedModel) -> None:
    generator = small_generator(model, tokens=1024, slots=8)
    common = prompts(1, least=40, most=40)[0]
    every = [
        Request((*common, *rest), max_new_tokens=4, settings=GREEDY, stops=(), tag=i)
        for i, rest in enumerate(prompts(8, least=5, most=9, seed=3))
    ]

    last = [event for event in generator.stream(*every) if event.statistics is not None]

    read = sum(e.statistics.prompt_tokens - 1 - e.statistics.cached_tokens for e in last)
    assert read <= 40 + 8 * 9


def test_guidance_mixes_two_prompts(model: LoadedModel) -> None:
    generator = Generator(model, tokens=4096, slots=4)
    good, bad = prompts(2)

    def text(prompt: object, scale: float | None) -> tuple[int, ...]:
        settings = SamplingSettings.greedy(cfg_scale=scale)
        made = generator.stream(Request(prompt, max_new_tokens=16, settings=settings, stops=()))
        return ids_of([*made])[None]

    assert text((good, bad), 1.0) == text(good, None)
    assert text((good, bad), 0.0) == text(bad, None)
    assert text((good, bad), 1.7) not in (text(good, None), text(bad, None))
    assert is_empty(generator)


def test_jobs_end_at_once_when_cancelled_anywhere(model: LoadedModel) -> None:
    generator = Generator(model, tokens=2048, slots=2)
    jobs = [generator.submit(request) for request in requests(6)]
    jobs[5].cancel()  # waits
    events = generator.step()
    assert [e.tag for e in events if e.reason == "cancelled"] == [5]
    jobs[0].cancel()  # runs
    events = generator.step()
    assert [e.tag for e in events if e.reason == "cancelled"] == [0]
    stream = generator.stream(requests(7)[6])
    next(stream)
    stream.close()
    for job in jobs:
        job.cancel()
    generator.step()

    assert is_empty(generator)


def test_abort_event_returns_the_texts_so_far(model: LoadedModel) -> None:
    generator, flag = Generator(model, tokens=2048, slots=2), threading.Event()
    flag.set()

    texts = generator.generate(["a", "b"], max_new_tokens=500, abort_event=flag)

    assert texts == ["", ""]
    assert is_empty(generator)


def test_a_hook_that_raises_ends_its_job_only(model: LoadedModel) -> None:
    def fails(sampled: Sampled) -> None:
        raise ValueError("of the hook")

    every = requests(4)
    every[1] = Request(every[1].prompt, max_new_tokens=24, hooks=(fails,), tag=1)
    generator = Generator(model, tokens=8192, slots=4)
    alone = ids_of([*generator.stream(every[0], every[2], every[3])])

    events = [*generator.stream(*every)]

    assert [(e.tag, str(e.error)) for e in events if e.error] == [(1, "of the hook")]
    assert {tag: ids for tag, ids in ids_of(events).items() if tag != 1} == alone
    assert is_empty(generator)


def test_hooks_see_and_replace_tokens(model: LoadedModel) -> None:
    seen: list[Sampled] = []

    def replaces(sampled: Sampled) -> None:
        seen.append(sampled)
        sampled.sampled_token = 7

    generator = Generator(model, tokens=2048, slots=2)
    ids = ids_of(
        [*generator.stream(Request((5, 6), max_new_tokens=4, hooks=(replaces,), stops=()))]
    )

    assert ids == {None: (7, 7, 7, 7)}
    assert all(0 < s.sampled_prob <= 1 and s.candidate_tokens for s in seen)
    follows = generator.stream(Request((5, 6, 7), max_new_tokens=1, settings=GREEDY, stops=()))
    assert ids_of([*follows])[None][0] == seen[1].candidate_tokens[0]  # it read the replaced token


@torch.inference_mode()
def test_values_that_are_not_finite_end_one_job_and_are_forgotten(
    folder: Path, model: LoadedModel
) -> None:
    broken = load_model(folder, device="cpu", max_tokens=1024)
    broken.decoder.embedding.weight[9] = math.nan
    generator = Generator(broken, tokens=8192, slots=4)
    good = [
        Request((5, 6, 7, i), max_new_tokens=16, settings=GREEDY, stops=(), tag=i) for i in (4, 8)
    ]
    bad = Request((5, 6, 9, 4), max_new_tokens=16, tag="bad")

    events = [*generator.stream(good[0], bad, good[1])]

    assert [type(e.error) for e in events if e.error] == [InferenceError]
    assert ids_of(events)[4] == ids_of([*Generator(model, tokens=1024).stream(good[0])])[4]
    assert is_empty(generator)


def test_a_dropped_generator_frees_its_memory_at_once(model: LoadedModel) -> None:
    gc.disable()
    try:
        generator = Generator(model, tokens=2048, slots=4)
        generator.generate(prompts(8), max_new_tokens=4, banned_strings=("a",))
        cache, views = (
            weakref.ref(generator._device_slots.cache),
            weakref.ref(generator._device_slots.lengths),
        )
        del generator
        assert (cache(), views()) == (None, None)
    finally:
        gc.enable()


def test_hundreds_of_waiting_jobs_end(model: LoadedModel) -> None:
    generator = Generator(model, tokens=8192, slots=32)
    source, ended = random.Random(0), list[Event]()
    jobs = [
        generator.submit(
            Request(prompt, max_new_tokens=source.randint(1, 3), stops=(), tag=i),
            deliver=lambda e: ended.append(e) if e.reason else None,
        )
        for i, prompt in enumerate(prompts(250, most=6))
    ]
    while not generator.is_idle:
        for job in source.sample(jobs, 12):
            job.cancel()
        generator.step()

    assert len(ended) == len(jobs)
    assert {event.reason for event in ended} == {"max_new_tokens", "cancelled"}
    assert is_empty(generator)


@pytest.mark.slow
def test_ten_thousand_jobs_leak_nothing(model: LoadedModel) -> None:
    def fail(_: object) -> None:
        raise ValueError("of a hook")

    generator = Generator(model, tokens=8192, slots=32)
    source, reasons, memory = random.Random(0), set[object](), list[int]()
    for _ in range(11):  # the first thousand only warm up
        jobs = [
            generator.submit(
                Request(prompt, max_new_tokens=i % 5 + 1, stops=(), hooks=[fail][: i % 20 == 7]),
                deliver=lambda event: reasons.add(event.reason),
            )
            for i, prompt in enumerate(prompts(1000, most=6))
        ]
        while not generator.is_idle:
            for job in source.sample(jobs, 8):
                job.cancel()
            generator.step()
        assert is_empty(generator)
        memory.append(psutil.Process().memory_info().rss)

    assert reasons == {None, "max_new_tokens", "cancelled", "error"}
    assert memory[-1] - memory[0] < 20e6


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (Request(()), InferenceError, "no tokens"),
        (Request((VOCAB_SIZE,)), InferenceError, f"id {VOCAB_SIZE} in the prompt"),
        (
            Request((5,), settings=SamplingSettings(token_bias=((VOCAB_SIZE - 1, 1.0),))),
            InferenceError,
            "`token_bias` has id",  # the tokenizer has fewer ids than the model
        ),
        (Request((5,) * 1025), ContextOverflow, "1025 prompt tokens"),
        (Request((5,) * 600), CacheFull, "600 prompt tokens"),
        (Request((5,), max_new_tokens=600), CacheFull, "600 new ones"),
        (Request((5,), max_new_tokens=2000), ContextOverflow, "2000 new ones"),
    ],
)
def test_requests_that_cannot_be_generated_are_refused(
    model: LoadedModel, request_: Request, error: type[Exception], words: str
) -> None:
    generator = Generator(model, tokens=512, slots=1)

    with pytest.raises(error, match=words):
        generator.submit(request_)
    assert is_empty(generator)


def test_a_cache_of_an_unknown_format_is_refused(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="q5"):
        Generator(model, cache="q5")


@pytest.mark.parametrize("cache", ["fp16", "fp8", "q8", "q6", "q4"])
def test_every_cache_gives_the_same_text_in_company(model: LoadedModel, cache: str) -> None:
    every = requests(5, tokens=12, logits=True)
    together = [*Generator(model, cache=cache, tokens=4096, slots=3).stream(*every)]
    lonely = Generator(model, cache=cache, tokens=1024, slots=1, chunk=256)

    check_same(model, cache, [event for r in every for event in lonely.stream(r)], together)


def test_probabilities_top_tokens_and_logits_come_with_their_tokens(model: LoadedModel) -> None:
    generator = Generator(model, tokens=1024, slots=1)
    request = Request(
        (5, 6, 7),
        max_new_tokens=6,
        settings=HOT,
        seed=1,
        stops=(),
        probabilities=True,
        top_tokens=3,
        logits=True,
    )

    events = [event for event in generator.stream(request) if event.ids]

    for event in events:
        assert len(event.ids) == len(event.probabilities) == len(event.top_ids) == len(event.logits)
        for token, p, top, logits in zip(
            event.ids, event.probabilities, event.top_ids, event.logits, strict=True
        ):
            known = logits[: model.tokenizer.vocab_size]
            expected = (known.double() / HOT.temperature).softmax(-1)
            assert p == pytest.approx(float(expected[token]), rel=1e-6)
            assert list(top) == known.topk(3).indices.tolist()
