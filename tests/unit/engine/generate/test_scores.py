"""`Request.scores`: log probabilities of prompts, and texts that do not notice."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter
from bounds import near, terms_of
from decoding import Again
from small_pages import PAGE_TOKENS, is_empty, small_generator
from tiny import VOCAB_SIZE

from exl2flow.core.errors import ConfigError, InferenceError
from exl2flow.engine.generate import PromptScores
from exl2flow.inference import (
    Adapter,
    Draft,
    Event,
    Generator,
    LoadedModel,
    NgramDraft,
    Request,
    SamplingSettings,
    load_model,
)
from exl2flow.inference.scoring.evaluate import evaluate
from exl2flow.kernels.cuda import graphs as cuda_graphs

GREEDY = SamplingSettings.greedy()


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    drawn = random.Random(seed)
    return tuple(drawn.randrange(3, 299) for _ in range(length))


def scored(ids: Any, scores: int | None = 3, **more: Any) -> Request:
    given = {"max_new_tokens": 0, "settings": GREEDY, "stops": (), "tag": ids, **more}
    return Request(ids, scores=scores, **given)


def scores_of(events: list[Event], tag: object) -> PromptScores:
    """Return the scores of a request, which come once, with all of its prompt read."""
    [event] = [e for e in events if e.tag == tag and e.scores is not None]
    assert event.stage == "prompt"
    assert event.read == event.total
    assert event.scores is not None
    return event.scores


@torch.inference_mode()
def check(model: LoadedModel, found: PromptScores, ids: tuple[int, ...], top: int = 3) -> None:
    """Compare with one pass of the decoder over the prompt."""
    assert found.ids == ids
    assert found.logs[0] is None
    assert len(found.logs) == len(ids)
    logits = model.decoder.forward(torch.tensor([ids]))[0, :-1]
    logs = logits.double().log_softmax(-1)
    bound = near(logits, terms_of(model.spec, len(ids)))["atol"] if len(ids) > 1 else 0.0
    expected = logs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0] if len(ids) > 1 else logs[:, 0]
    torch.testing.assert_close(
        torch.tensor(found.logs[1:], dtype=torch.float64), expected, rtol=0, atol=bound
    )
    if not top:
        assert (found.top_ids, found.top_logs) == ((), ())
        return
    assert (found.top_ids[0], found.top_logs[0]) == ((), ())
    rows = zip(found.top_ids[1:], found.top_logs[1:], logs, strict=True)
    for top_ids, top_logs, row in rows:
        best = row[: model.tokenizer.vocab_size].topk(top).values
        assert len({*top_ids}) == top
        assert row[[*top_ids]].tolist() == pytest.approx(best.tolist(), abs=bound)
        assert list(top_logs) == pytest.approx(best.tolist(), abs=bound)
        assert list(top_logs) == sorted(top_logs, reverse=True)


@pytest.mark.parametrize(("length", "top"), [(1, 20), (2, 1), (256, 0), (257, 20), (700, 1)])
def test_scores_are_those_of_one_pass(model: LoadedModel, length: int, top: int) -> None:
    generator, ids = Generator(model, tokens=1024, chunk=256), prompt(length)

    events = [*generator.stream(scored(ids, top))]

    check(model, scores_of(events, ids), ids, top)
    last = events[-1]
    assert (last.text, last.ids, last.reason) == ("", (), "max_new_tokens")
    assert last.statistics is not None
    assert (last.statistics.new_tokens, last.statistics.prompt_tokens) == (0, length)
    assert is_empty(generator)


def test_ends_of_prompts_that_are_read_by_recordings_are_scored(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "CudaGraph", Again)
    monkeypatch.setattr(Again, "made", [], raising=False)
    generator = Generator(model, tokens=4096, chunk=256)
    generator._device_slots.graphs.records = True
    given = [prompt(256 + length, length) for length in (3, 9)]
    of_tails = generator._device_slots.runner._tails
    assert of_tails is not None
    tails, takes = list[bool](), of_tails.takes

    def asked(segments: Any) -> bool:
        tails.append(takes(segments))
        return tails[-1]

    monkeypatch.setattr(of_tails, "takes", asked)

    events = [*generator.stream(*map(scored, given))]

    assert tails == [False, True, False, True]
    for ids in given:
        check(model, scores_of(events, ids), ids)


def test_sums_are_those_of_validation(folder: Path, model: LoadedModel) -> None:
    rows = [prompt(600, seed) for seed in range(2)]
    [score] = evaluate([folder], torch.tensor(rows))

    events = [*Generator(model, tokens=2048).stream(*(scored(ids, 0) for ids in rows))]

    for ids, losses in zip(rows, score.rows.losses, strict=True):
        total = sum(log for log in scores_of(events, ids).logs if log is not None)
        assert -total == pytest.approx(losses, abs=1e-5 * len(ids))


def test_cached_prefixes_are_read_again_and_serve_others_afterwards(model: LoadedModel) -> None:
    generator, ids = small_generator(model, tokens=512, chunk=16), prompt(40)
    generator.generate([ids[:34]], max_new_tokens=3, settings=GREEDY, stops=())

    events = [*generator.stream(scored(ids))]
    later = [*generator.stream(scored(ids, None, max_new_tokens=1))][-1].statistics

    check(model, scores_of(events, ids), ids)
    own = events[-1].statistics
    assert own is not None
    assert later is not None
    assert (own.cached_tokens, later.cached_tokens) == (0, 39)


def test_others_take_the_pages_of_a_prompt_that_is_being_scored(model: LoadedModel) -> None:
    generator, ids = small_generator(model, tokens=512, chunk=16), prompt(44)
    others = [scored(ids, None, max_new_tokens=4, tag=i) for i in range(2)]

    events = [*generator.stream(scored(ids), *others, scored(ids, 1, tag="again"))]

    check(model, scores_of(events, ids), ids)
    check(model, scores_of(events, "again"), ids, 1)
    cached = [e.statistics.cached_tokens for e in events if e.statistics and e.tag in (0, 1)]
    assert min(cached) >= 2 * PAGE_TOKENS
    assert is_empty(generator)


@pytest.mark.parametrize("kind", ["draft", "ngram"])
def test_texts_are_bit_for_bit_those_without_scores(model: LoadedModel, kind: str) -> None:
    draft = Draft(model=model, least=0.0) if kind == "draft" else NgramDraft()
    given = [prompt(length, length) for length in (3, 20, 40)]
    found = list[dict[object, list[Any]]]()
    for scores in (None, 2):
        generator = small_generator(model, tokens=512, chunk=16, draft=draft)
        events = [
            *generator.stream(
                *(
                    scored(ids, scores if i else None, max_new_tokens=12, logits=True)
                    for i, ids in enumerate(given)
                )
            )
        ]
        found.append({ids: [] for ids in given})
        for event in events:
            found[-1][event.tag] += [*zip(event.ids, event.logits, strict=True)]

    for ids in given[1:]:
        check(model, scores_of(events, ids), ids, 2)
    for ids in given:
        plain, beside = found[0][ids], found[1][ids]
        assert [token for token, _ in plain] == [token for token, _ in beside]
        assert len(plain) == 12
        assert all(torch.equal(x, y) for (_, x), (_, y) in zip(plain, beside, strict=True))


@pytest.mark.parametrize("while_read", [True, False])
def test_preempted_prompts_are_scored_once_and_whole(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, while_read: bool
) -> None:
    generator = small_generator(model, tokens=4 * PAGE_TOKENS, chunk=16, slots=3)
    given, preempted = [prompt(14, 1), prompt(44, 2)], list[bool]()
    preempt = generator._scheduler.preempt
    monkeypatch.setattr(
        generator._scheduler,
        "preempt",
        lambda job: (preempted.append(job.lead.is_scoring), preempt(job)),
    )
    requests = [scored(ids, 2, max_new_tokens=20) for ids in given]
    events = list[Event]()
    for one in requests:
        generator.submit(one, deliver=events.append)
    generator.step()
    generator.step()
    if while_read:
        generator._scheduler.preempt(generator._scheduler.running[-1])
        generator._scheduler.page_pool.clear()  # what has been scored is read once more

    while not generator.is_idle:
        generator.step()

    assert preempted == [while_read]  # the cache lacks a page for both texts
    alone = Generator(model, tokens=1024)
    for ids in given:
        check(model, scores_of(events, ids), ids, 2)
        texts = ["".join(e.text for e in x if e.tag == ids) for x in (events,)]
        assert texts == alone.generate([ids], max_new_tokens=20, settings=GREEDY, stops=())
    assert is_empty(generator)


def test_a_pair_has_the_scores_of_its_first_prompt(model: LoadedModel) -> None:
    first, second = prompt(300), prompt(20, 1)
    settings = SamplingSettings(cfg_scale=1.5)
    for count in (0, 5):
        one = scored((first, second), max_new_tokens=count, settings=settings, tag=0, seed=1)
        events = [*Generator(model, tokens=2048).stream(one)]

        check(model, scores_of(events, 0), first)
        assert sum(len(event.ids) for event in events) == count


def test_an_adapter_counts_as_the_model(folder: Path, model: LoadedModel, tmp_path: Path) -> None:
    generator, ids = Generator(model, tokens=1024), prompt(20)
    adapter = Adapter.load(make_adapter(tmp_path / "adapter", folder), model)
    events = [*generator.stream(scored(ids), scored(ids, adapters=(adapter,), tag="adapted"))]

    check(model, scores_of(events, ids), ids)
    assert scores_of(events, "adapted").logs != scores_of(events, ids).logs


def test_the_head_runs_on_a_bounded_number_of_rows(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, rows = model.decoder.head, list[int]()
    monkeypatch.setattr(
        model.decoder, "head", lambda hidden: rows.append(hidden.shape[1]) or head(hidden)
    )

    [*Generator(model, tokens=1024).stream(scored(prompt(700)))]

    assert rows == [256, 256, 187]


def test_a_prompt_without_finite_logits_ends_its_own_request_only(folder: Path) -> None:
    broken = load_model(folder, device="cpu", max_tokens=1024)
    with torch.inference_mode():
        broken.decoder.embedding.weight[9] = math.nan
    generator, good = Generator(broken, tokens=2048), (5, 6, 7)

    events = [*generator.stream(scored((5, 9, 6), tag="bad"), scored(good))]

    [bad] = [event for event in events if event.tag == "bad" and event.reason]
    assert isinstance(bad.error, InferenceError)
    assert "not finite" in str(bad.error)
    check(broken, scores_of(events, good), good)
    assert not any(event.scores for event in events if event.tag == "bad")


def test_more_scores_than_the_vocabulary_are_refused(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exl2flow.core.requests.request.MOST_RANKED", 1000)

    with pytest.raises(ConfigError, match=f"`scores` is {VOCAB_SIZE + 1}, the vocabulary"):
        Generator(model, tokens=1024).submit(scored((5, 6), VOCAB_SIZE + 1))


def test_a_prompt_may_fill_all_positions_if_nothing_follows(model: LoadedModel) -> None:
    ids = prompt(1024)
    generator = Generator(model, tokens=1024)

    check(model, scores_of([*generator.stream(scored(ids, 0))], ids), ids, 0)
