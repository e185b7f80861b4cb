"""Pages from host memory and disk: the same texts as without, and none that cannot be trusted."""

import gc
import os
import random
import select
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import kept
import pytest
import torch
from adapters import make_adapter
from small_pages import PAGE_TOKENS, small_generator
from tiny import VOCAB_SIZE, make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.engine.cache.prefix_tree import FullPage
from exl2flow.inference import (
    Adapter,
    Draft,
    Event,
    Generator,
    LoadedModel,
    NgramDraft,
    PromptCache,
    Request,
    SamplingSettings,
    load_model,
)

GREEDY = SamplingSettings.greedy()
HOT = SamplingSettings(temperature=1.5, top_k=0, top_p=0.0, repetition_penalty=1.1)
ROOM = 6 * PAGE_TOKENS  # tokens of the cache: a prompt drives out the one before it
LONG = 5 * PAGE_TOKENS + 4
RAM = 10**8
PATIENCE_SECONDS = 60.0
Results = list[tuple[list[int], int]]


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder, device="cpu", max_tokens=2048)


def prompt(seed: int, tokens: int = LONG) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(3, VOCAB_SIZE) for _ in range(tokens))


def request(seed: int, **more: object) -> Request:
    options = {"max_new_tokens": 12, "settings": GREEDY, "stops": (), "seed": seed, **more}
    return Request(**{"prompt": prompt(seed), **options})  # type: ignore[arg-type]  # options by name


def results(generator: Generator, requests: Sequence[Request]) -> Results:
    """Return ids and cached tokens of requests, one after the other."""
    found = Results()
    for each in requests:
        events = [*generator.stream(each)]
        assert events[-1].statistics is not None
        ids = [token for event in events for token in event.ids]
        found.append((ids, events[-1].statistics.cached_tokens))
    return found


def run(model: LoadedModel, requests: Sequence[Request], **options: object) -> Results:
    """Return the results of a new generator, which is closed then."""
    generator = small_generator(model, **{"tokens": ROOM, "slots": 2, **options})  # type: ignore[arg-type]  # options by name
    try:
        return results(generator, requests)
    finally:
        generator.close()


def ids(found: Results) -> list[list[int]]:
    return [one for one, _ in found]


def pages(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.page"))


@pytest.mark.parametrize("cache", ["fp16", "q4"])
def test_texts_are_the_same_from_host_memory(model: LoadedModel, cache: str) -> None:
    requests = [request(seed) for seed in (1, 2, 3, 1, 2, 3)]
    plain = run(model, requests, cache=cache)

    found = run(model, requests, cache=cache, keep=PromptCache(ram=RAM))

    assert ids(found) == ids(plain)
    assert [cached for _, cached in plain] == [0] * 6
    assert [cached for _, cached in found] == [0] * 3 + [5 * PAGE_TOKENS] * 3


@pytest.mark.parametrize("kind", ["n-grams", "model"])
def test_texts_are_the_same_from_disk_after_a_restart(
    model: LoadedModel, tmp_path: Path, kind: str
) -> None:
    requests = [request(1), request(2, settings=HOT), request(3, heal=True)]
    draft = NgramDraft() if kind == "n-grams" else Draft(model=model)
    keep = PromptCache(disk=tmp_path / "pages")
    plain = run(model, requests)
    first = run(model, requests, keep=keep, draft=draft)

    again = run(model, requests, keep=keep, draft=draft)

    assert ids(again) == ids(first) == ids(plain)
    assert [cached for _, cached in again] == [5 * PAGE_TOKENS] * 3


def test_a_text_that_goes_on_uses_pages_of_its_answer(model: LoadedModel, tmp_path: Path) -> None:
    keep = PromptCache(disk=tmp_path / "pages")
    asked = request(1, prompt=prompt(1, 44), max_new_tokens=7)
    [(answer, _)] = run(model, [asked], keep=keep)
    longer = request(1, prompt=(*asked.prompt, *answer, 5, 6, 7))

    [(again, cached)] = run(model, [longer], keep=keep)

    assert cached == 3 * PAGE_TOKENS
    assert again == ids(run(model, [longer]))[0]


def test_adapters_and_salts_share_nothing(folder: Path, model: LoadedModel, tmp_path: Path) -> None:
    keep = PromptCache(disk=tmp_path / "pages", ram=RAM)
    adapter = Adapter.load(make_adapter(tmp_path / "a", folder, rank=4, alpha=8, seed=1), model)
    kinds = [request(1), request(1, adapters=(adapter,)), request(1, salt=b"x")]
    plain = run(model, kinds)

    first, again = run(model, kinds, keep=keep), run(model, kinds, keep=keep)

    assert ids(first) == ids(again) == ids(plain)
    assert plain[0][0] != plain[1][0]
    assert [cached for _, cached in first] == [0] * 3
    assert [cached for _, cached in again] == [5 * PAGE_TOKENS] * 3
    assert len(pages(tmp_path / "pages")) == 3 * 5


def test_texts_that_begin_alike_enter_together(model: LoadedModel, tmp_path: Path) -> None:
    keep = PromptCache(disk=tmp_path / "pages")
    run(model, [request(1)], keep=keep)
    requests = [request(1, prompt=(*prompt(1), seed), tag=seed) for seed in range(5, 11)]
    generator = small_generator(model, tokens=16 * PAGE_TOKENS, slots=6, keep=keep)
    found, hits = dict[object, list[int]](), Counter[str]()

    for event in generator.stream(*requests):
        found.setdefault(event.tag, []).extend(event.ids)
        hits.update(event.statistics.hits if event.statistics else {})

    assert [found[one.tag] for one in requests] == ids(run(model, requests))
    assert (hits["ram"], hits["disk"]) == (0, 5 * PAGE_TOKENS)  # by one of them; 5 share these
    assert hits["gpu"] >= 5 * 5 * PAGE_TOKENS


def test_statistics_tell_the_tier_of_what_was_found(model: LoadedModel, tmp_path: Path) -> None:
    """Room for the pages of one prompt in the cache, for those of another in host memory."""
    probe = small_generator(model, tokens=ROOM, keep=PromptCache(ram=RAM))
    results(probe, [request(1), request(2)])
    page = probe.tier_bytes["ram"] // 5  # the first prompt's pages
    keep = PromptCache(ram=5 * page, disk=tmp_path / "pages")
    generator = small_generator(model, tokens=ROOM, keep=keep)

    def hits(seed: int) -> list[int]:
        *_, last = generator.stream(request(seed))
        assert last.statistics is not None
        assert sum(last.statistics.hits.values()) == last.statistics.cached_tokens
        return [last.statistics.hits[tier] for tier in ("gpu", "ram", "disk")]

    assert hits(1) == hits(2) == hits(3) == [0, 0, 0]
    assert hits(3) == [LONG - 1, 0, 0]
    assert hits(2) == [0, 5 * PAGE_TOKENS, 0]
    generator._tiers._writer.submit(lambda: None).result()  # type: ignore[union-attr]
    assert hits(1) == [0, 0, 5 * PAGE_TOKENS]
    assert generator.tier_bytes["ram"] == 5 * page
    assert generator.tier_bytes["disk"] == sum(p.stat().st_size for p in pages(keep.disk))  # type: ignore[arg-type]


def test_texts_that_run_meanwhile_and_preemptions_change_nothing(
    model: LoadedModel, tmp_path: Path
) -> None:
    keep = PromptCache(disk=tmp_path / "pages", ram=RAM // 1600)
    requests = [request(seed, prompt=prompt(seed % 3, 36), tag=seed) for seed in range(9)]
    for _ in range(2):
        generator = small_generator(model, tokens=ROOM, slots=4, keep=keep)
        found = dict[object, list[int]]()
        for event in generator.stream(*requests):
            found.setdefault(event.tag, []).extend(event.ids)
        assert generator.free_pages == generator.pages
        generator.close()

        assert [found[one.tag] for one in requests] == ids(run(model, requests))


def test_one_page_alone_is_not_worth_waiting(model: LoadedModel, tmp_path: Path) -> None:
    keep, short = PromptCache(disk=tmp_path / "pages"), request(1, prompt=prompt(1, 20))
    run(model, [short], keep=keep)

    assert run(model, [short], keep=keep)[0][1] == 0


def test_scores_of_a_prompt_are_the_same(model: LoadedModel, tmp_path: Path) -> None:
    keep, scored = PromptCache(disk=tmp_path / "pages"), request(1, scores=2)
    run(model, [request(1)], keep=keep)

    def scores(keep: PromptCache | None) -> object:
        events = [*small_generator(model, tokens=ROOM, keep=keep).stream(scored)]
        return next(event.scores for event in events if event.scores)

    assert scores(keep) == scores(None)


def test_what_is_wrong_in_the_middle_is_read_again(model: LoadedModel, tmp_path: Path) -> None:
    keep = PromptCache(disk=tmp_path / "pages")
    plain = run(model, [request(1)], keep=keep)
    by_age = sorted(pages(tmp_path / "pages"), key=lambda path: path.stat().st_mtime_ns)
    middle = by_age[2]  # the end was written first
    content = middle.read_bytes()
    half = len(content) // 2
    zeros = bytes(len(content) - half)
    for damaged in (content[:-5], content[:half] + zeros, None, by_age[3].read_bytes()):
        if damaged is None:
            middle.unlink()
        else:
            middle.write_bytes(damaged)

        found = run(model, [request(1)], keep=keep)

        assert found == [(ids(plain)[0], 2 * PAGE_TOKENS)]
        assert middle.read_bytes() == content  # written anew
    assert run(model, [request(1)], keep=keep)[0][1] == 5 * PAGE_TOKENS


def test_another_model_format_or_draft_finds_nothing(
    folder: Path, model: LoadedModel, tmp_path: Path
) -> None:
    keep = PromptCache(disk=tmp_path / "pages")
    run(model, [request(1)], keep=keep)
    other = load_model(make_tiny("llama", tmp_path / "m", seed=1), device="cpu", max_tokens=2048)
    rope = load_model(folder, device="cpu", max_tokens=2048, rope_scale=2.0)

    for one, options in (
        (other, {}),
        (rope, {}),
        (model, {"cache": "q8"}),
        (model, {"draft": Draft(model=model)}),
    ):
        found = run(one, [request(1)], keep=keep, **options)
        assert found == run(one, [request(1)], **options)
    assert run(model, [request(1)], keep=keep)[0][1] == 5 * PAGE_TOKENS


def test_a_copy_of_the_model_finds_its_pages(
    folder: Path, model: LoadedModel, tmp_path: Path
) -> None:
    keep = PromptCache(disk=tmp_path / "pages")
    run(model, [request(1)], keep=keep)
    copy = load_model(make_tiny("llama", tmp_path / "copy"), device="cpu", max_tokens=1536)

    assert run(copy, [request(1)], keep=keep)[0][1] == 5 * PAGE_TOKENS


def test_host_memory_keeps_to_its_bytes_and_the_beginning_stays_longest(model: LoadedModel) -> None:
    generator = small_generator(model, tokens=ROOM, slots=1, keep=PromptCache(ram=RAM))
    assert generator._tiers is not None
    one = generator._tiers._pages.nbytes
    requests = [request(1), request(2), request(1)]

    found = run(model, requests, keep=PromptCache(ram=3 * one + 5))

    assert found[2][1] == 3 * PAGE_TOKENS
    assert ids(found) == ids(run(model, requests))


def test_pages_that_are_not_finite_are_deleted_everywhere(
    model: LoadedModel, tmp_path: Path
) -> None:
    keep = PromptCache(disk=tmp_path / "pages", ram=RAM)
    run(model, [request(1), request(2)], keep=keep)
    generator = small_generator(model, tokens=ROOM, slots=1, keep=keep)
    results(generator, [request(2)])
    job = generator.submit(request(1))
    while not job.output.new_tokens > 0:
        generator.step()
    generator.states.stored[0].fill_(255)  # NaN: as if a multiplication had gone wrong
    events = list[Event]()
    while not generator.is_idle:
        events += generator.step()
    generator.close()

    assert events[-1].reason == "error"
    [(_, first), (_, second)] = run(model, [request(1), request(2)], keep=keep)
    assert (first, second) == (0, 5 * PAGE_TOKENS)


def test_a_dropped_generator_frees_its_memory_at_once(model: LoadedModel, tmp_path: Path) -> None:
    keep = PromptCache(disk=tmp_path / "pages", ram=RAM)
    generator = small_generator(model, tokens=ROOM, keep=keep)
    results(generator, [request(1), request(2)])
    stored = weakref.ref(generator.states.stored[0])
    base = weakref.ref(generator._device_slots)
    gc.collect()
    gc.disable()
    try:
        del generator
        assert stored() is None
        assert base() is None
    finally:
        gc.enable()


def test_closing_twice_is_no_error_and_the_generator_goes_on(
    model: LoadedModel, tmp_path: Path
) -> None:
    generator = small_generator(model, tokens=ROOM, keep=PromptCache(disk=tmp_path / "pages"))
    first = results(generator, [request(1)])
    generator.close()
    generator.close()

    assert ids(results(generator, [request(2), request(1)]))[1] == first[0][0]
    assert len(pages(tmp_path / "pages")) == 5


def test_a_job_that_ends_while_its_pages_are_read_holds_nobody_up(
    model: LoadedModel, tmp_path: Path
) -> None:
    keep = PromptCache(disk=tmp_path / "pages")
    plain = run(model, [request(1)], keep=keep)
    generator = small_generator(model, tokens=ROOM, slots=2, keep=keep)
    jobs = [generator.submit(request(1)) for _ in range(2)]
    generator.step()
    generator.cancel(jobs[0])
    found = list[int]()
    while not generator.is_idle:
        found += [token for event in generator.step() for token in event.ids]

    assert found[-12:] == plain[0][0]
    assert generator.free_pages == generator.pages


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="`ram` of a prompt cache is -1"):
        PromptCache(ram=-1)


def check_beside(model: LoadedModel, pages_folder: Path, seed: int) -> None:
    """Expect texts as without the pages that another process writes, or has left."""
    keep = PromptCache(disk=pages_folder)
    requests = [kept.request(one) for one in range(seed, seed + 3)]
    assert ids(run(model, requests, keep=keep)) == ids(run(model, requests))


@contextmanager
def writing(folder: Path, pages_folder: Path, seed: int) -> Iterator[subprocess.Popen]:
    """Run a process that has begun to write pages."""
    program = [sys.executable, kept.__file__, str(folder), str(pages_folder), str(seed)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], PATIENCE_SECONDS)[0]
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


def test_processes_share_a_folder_and_one_that_is_killed_leaves_no_bad_page(
    folder: Path, model: LoadedModel, tmp_path: Path
) -> None:
    where = tmp_path / "pages"
    with writing(folder, where, 1):
        check_beside(model, where, 1)

    check_beside(model, where, 1)  # now it is killed
    assert pages(where)
    assert os.listdir(where).count("secret") == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_processes_that_are_killed_while_they_write_leave_no_bad_page(
    folder: Path, model: LoadedModel, tmp_path: Path
) -> None:
    source, where = random.Random(200), tmp_path / "pages"
    for number in range(200):
        with writing(folder, where, number % 5) as process:
            time.sleep(source.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL if number % 2 == 0 else signal.SIGTERM)
            process.wait(PATIENCE_SECONDS)
        check_beside(model, where, number % 5)


def test_reads_that_are_cancelled_while_a_text_waits_for_them_are_computed(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, one = PromptCache(disk=tmp_path / "pages"), [request(1)]
    expected = run(model, one, keep=keep)
    generator = small_generator(model, tokens=ROOM, slots=2, keep=keep)
    tiers = generator._tiers
    assert tiers is not None

    def cancelled(page: FullPage) -> tuple[str, Future[torch.Tensor | None]]:
        result = Future[torch.Tensor | None]()
        result.cancel()
        return "disk", result

    monkeypatch.setattr(tiers, "read", cancelled)
    found = results(generator, one)
    generator.close()

    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    assert generator.failure is None
