"""Prompts with embeddings in place of tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_pages import PAGE_TOKENS, small_generator
from tiny import VOCAB_SIZE
from transformers import AutoModelForCausalLM

from exl2flow.core.errors import ConfigError, InferenceError
from exl2flow.core.requests.request import EMBEDDING, FIRST_EMBEDDING
from exl2flow.engine.drafts import Draft, NgramDraft
from exl2flow.engine.generate.prompt import encoded
from exl2flow.inference import Event, Generator, LoadedModel, Request, SamplingSettings

WIDTH = 64
GREEDY = SamplingSettings.greedy()
HOT = SamplingSettings(temperature=2.0, top_k=0, top_p=0.0)


def rows_of(count: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def ids_of(count: int, *, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


def request(*parts: list[int] | torch.Tensor, **more: Any) -> Request:
    """Return a request whose prompt is ids and embeddings in this order."""
    ids, tensors = list[int](), list[torch.Tensor]()
    for part in parts:
        if isinstance(part, torch.Tensor):
            first = FIRST_EMBEDDING + sum(map(len, tensors))
            ids += range(first, first + len(part))
            tensors.append(part)
        else:
            ids += part
    options = {"max_new_tokens": 12, "settings": GREEDY, "stops": ()} | more
    return Request(ids, embeddings=tensors, **options)


def run(generator: Generator, *requests: Request) -> list[tuple[list[int], Event]]:
    """Return ids and last event of each request, generated together."""
    jobs = [(generator.submit(r, deliver=(seen := []).append), seen) for r in requests]
    while not generator.is_idle:
        generator.step()
    assert generator.free_pages == generator.pages
    return [([i for event in events for i in event.ids], events[-1]) for _, events in jobs]


def ids_after(model: LoadedModel, *requests: Request, tokens: int = 8192) -> list[list[int]]:
    return [ids for ids, _ in run(Generator(model, tokens=tokens, slots=4, chunk=256), *requests)]


PROMPTS = (
    (ids_of(9), rows_of(5), ids_of(4)),
    (rows_of(1, seed=1), ids_of(1)),
    (ids_of(200), rows_of(480, seed=2), ids_of(3), rows_of(7, seed=3), ids_of(30)),
    (rows_of(300, seed=4), rows_of(300, seed=5), ids_of(2)),
    (ids_of(20),),
)


@torch.no_grad()
def test_greedy_text_is_that_of_transformers(folder: Path, model: LoadedModel) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    embed = reference.get_input_embeddings()

    together = ids_after(model, *(request(*parts) for parts in PROMPTS))

    for parts, made in zip(PROMPTS, together, strict=True):
        rows = [p if isinstance(p, torch.Tensor) else embed(torch.tensor(p)) for p in parts]
        expected = reference.generate(
            inputs_embeds=torch.cat(rows)[None],
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=[*range(model.tokenizer.vocab_size, VOCAB_SIZE)],
        )
        assert made == expected[0].tolist()
        assert [made] == ids_after(model, request(*parts), tokens=1024)


@pytest.mark.parametrize("more", [{"banned_strings": ("a", "e", "5")}, {"heal": True}, {}])
def test_the_models_own_rows_are_as_good_as_their_tokens(
    model: LoadedModel, more: dict[str, Any]
) -> None:
    ids, options = ids_of(300), {"settings": HOT, "seed": 3, "max_new_tokens": 40} | more
    rows = model.decoder.embedding.weight[ids[:280]]

    given, known = ids_after(model, request(rows, ids[280:], **options), request(ids, **options))

    assert given == known


def test_equal_rows_are_read_once(model: LoadedModel) -> None:
    generator = Generator(model, tokens=8192, slots=4)
    before, rows, after = ids_of(300), rows_of(400), ids_of(9)
    first = request(before, rows, after)

    [(ids, end)] = run(generator, first)
    [(again, known)] = run(generator, request(before, rows.clone().double(), after))
    [(others, other)] = run(generator, request(before, rows_of(400, seed=1), after))
    [(_, later)] = run(generator, request(before, rows, [*after, *ids], rows_of(2), [5]))

    assert (again, others) == (
        ids,
        ids_after(model, request(before, rows_of(400, seed=1), after))[0],
    )
    cached = [event.statistics.cached_tokens for event in (end, known, other, later)]
    assert cached[:3] == [0, 708, 300]
    assert cached[3] > 709


def test_rows_that_jobs_read_together_are_shared(model: LoadedModel) -> None:
    generator, rows = small_generator(model, tokens=512, slots=4), rows_of(40)
    wanted = [request(rows, ids_of(9, seed=i)) for i in range(3)]

    found = run(generator, *wanted)

    assert [ids for ids, _ in found] == [ids_after(model, each)[0] for each in wanted]
    assert sum(e.statistics.prompt_tokens - 1 - e.statistics.cached_tokens for _, e in found) < 90


def test_a_job_that_was_sent_back_reads_its_rows_again(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [
        request(rows_of(6, seed=i), ids_of(5), max_new_tokens=20, settings=HOT, seed=i)
        for i in range(4)
    ]
    cramped, preempted = small_generator(model, tokens=5 * PAGE_TOKENS, slots=4), list[object]()
    preempt = cramped._scheduler.preempt

    def forgets(job: Any) -> None:
        preempted.append(job)
        preempt(job)
        cramped._scheduler.page_pool.clear()

    monkeypatch.setattr(cramped._scheduler, "preempt", forgets)

    assert [ids for ids, _ in run(cramped, *wanted)] == ids_after(model, *wanted)
    assert preempted


@pytest.mark.parametrize("kind", ["model", "ngrams"])
def test_drafts_change_no_text_after_embeddings(model: LoadedModel, kind: str) -> None:
    draft = Draft(model=model, least=0.0) if kind == "model" else NgramDraft()
    repeated = rows_of(40)
    wanted = [
        request(ids_of(9, seed=i), repeated, [7, 8], repeated, [7, 8], max_new_tokens=40)
        for i in range(3)
    ]

    found = run(Generator(model, tokens=8192, slots=4, chunk=256, draft=draft), *wanted)

    assert [ids for ids, _ in found] == ids_after(model, *wanted)
    assert all(event.statistics.drafted_tokens for _, event in found)


def test_penalties_see_no_rows(model: LoadedModel) -> None:
    generator = Generator(model, tokens=1024, slots=1)
    generator.submit(request(ids_of(3), rows_of(4), ids_of(2)))
    generator.step()

    history = generator._device_slots.sampler.history[0, :9].tolist()
    known = generator._device_slots.sampler.vocab_size
    assert history == [*ids_of(3), *[known] * 4, *ids_of(2)]


def test_either_prompt_of_a_pair_may_lack_the_embeddings(model: LoadedModel) -> None:
    rows, good, bad = rows_of(6), ids_of(7), ids_of(5, seed=1)
    ids = [*range(FIRST_EMBEDDING, FIRST_EMBEDDING + 6)]

    def made(prompt: Any, scale: float | None) -> list[int]:
        settings = SamplingSettings.greedy(cfg_scale=scale)
        return ids_after(
            model,
            Request(prompt, embeddings=(rows,), settings=settings, max_new_tokens=8, stops=()),
        )[0]

    alone = ids_after(model, request(rows, good, max_new_tokens=8))[0]
    assert made(([*ids, *good], bad), 1.0) == alone
    assert made((bad, [*ids, *good]), 0.0) == alone
    assert made(([*ids, *good], bad), 1.7) != alone


def test_rows_may_change_after_they_were_submitted(model: LoadedModel) -> None:
    rows, generator = rows_of(6), Generator(model, tokens=1024, slots=1)
    expected = ids_after(model, request(rows, [5]))[0]
    job = generator.submit(request(rows, [5]))
    rows.zero_()
    while not generator.is_idle:
        generator.step()

    assert job.output.ids == expected


def test_markers_in_a_text_stand_for_tensors(model: LoadedModel) -> None:
    tokenizer, tensors = model.tokenizer, (rows_of(2), rows_of(3))
    first, second = (
        [*range(FIRST_EMBEDDING + a, FIRST_EMBEDDING + b)] for a, b in ((0, 2), (2, 5))
    )
    a, b, c = (tokenizer.encode(text) for text in (" A\n", "and", "\nhere "))

    def ids(prompt: str, *given: torch.Tensor, **more: Any) -> list[int]:
        return [*encoded(Request(prompt, embeddings=given, **more), tokenizer).sequences[0]]

    text = f" A\n \t{EMBEDDING}  and\t{EMBEDDING} \nhere "
    assert ids(text, *tensors) == [0, *a, *first, *b, *second, *c]
    assert ids(f"{EMBEDDING}{EMBEDDING}and", *tensors, add_bos=False) == [*first, *second, *b]
    assert ids(f"and{EMBEDDING}") == [0, *tokenizer.encode(f"and{EMBEDDING}")]


def test_a_token_right_after_an_embedding_is_not_healed(model: LoadedModel) -> None:
    (space,) = model.tokenizer.encode(" ")

    def healed(*parts: Any) -> int | None:
        return encoded(request(*parts, heal=True), model.tokenizer).healed

    assert healed([5], rows_of(1), [5, space]) == space
    assert healed([5], rows_of(1), [space]) is None


def test_text_after_an_embedding_is_decoded_like_any_other(model: LoadedModel) -> None:
    one, b = (model.tokenizer.encode(text) for text in ("one", "b"))
    wanted = Request(
        f"one {EMBEDDING} b", embeddings=[rows_of(3)], settings=GREEDY, max_new_tokens=9
    )
    text = "".join(event.text for event in Generator(model, tokens=512).stream(wanted))

    [ids] = ids_after(model, request([0, *one], rows_of(3), b, max_new_tokens=9))
    assert text == model.tokenizer.decode(ids)


NAN = rows_of(3).index_fill(0, torch.tensor([1]), torch.nan)


@pytest.mark.parametrize(
    ("prompt", "tensors", "message"),
    [
        ("a", [rows_of(2)], "`embeddings` has 1 tensors; give `prompt` one"),
        (f"{EMBEDDING} a", [rows_of(2), rows_of(2)], "`embeddings` has 2 tensors"),
        (f"{EMBEDDING}{EMBEDDING} a", [rows_of(2)], "`embeddings` has 1 tensors"),
        ([5], [rows_of(2)], "`embeddings` has 1 tensors; give .* or ids from 1000000000 on"),
        ([FIRST_EMBEDDING + 2, 5], [rows_of(2)], "id 1000000002 in the prompt is row 2 .* has 2"),
        (f"{EMBEDDING} a", rows_of(2), r"contains a tensor of shape \(64,\) and torch.float32"),
        (f"{EMBEDDING} a", [rows_of(2)[None]], r"contains a tensor of shape \(1, 2, 64\)"),
        (f"{EMBEDDING} a", [rows_of(2)[:0]], r"contains a tensor of shape \(0, 64\)"),
        (f"{EMBEDDING} a", [rows_of(2).int()], "and torch.int32; it takes rows"),
        (f"{EMBEDDING} a", ["x"], "`embeddings` contains 'x', which is not a tensor"),
        (f"{EMBEDDING} a", 5, "`embeddings` is 5; it must be a sequence"),
        (f"{EMBEDDING} a", [rows_of(2)[:, :32]], "of width 32, the hidden size of the model is 64"),
        (f"{EMBEDDING} a", [NAN], "not finite in torch.float32"),
        (f"{EMBEDDING} a", [rows_of(2).double() * 1e60], "not finite in torch.float32"),
    ],
)
def test_embeddings_that_cannot_be_read_are_refused(
    model: LoadedModel, prompt: Any, tensors: Any, message: str
) -> None:
    generator = Generator(model, tokens=512, slots=1)

    with pytest.raises(ConfigError, match=message):
        generator.submit(Request(prompt, embeddings=tensors, max_new_tokens=4))
    assert generator.is_idle


def test_a_prompt_cannot_end_in_an_embedding(model: LoadedModel) -> None:
    generator = Generator(model, tokens=512, slots=1)

    for prompt in (f"a {EMBEDDING} ", [5, FIRST_EMBEDDING]):
        with pytest.raises(InferenceError, match="the prompt ends in an embedding"):
            generator.submit(Request(prompt, embeddings=[rows_of(1)], max_new_tokens=4))


def test_other_unknown_ids_are_refused_beside_embeddings(model: LoadedModel) -> None:
    generator = Generator(model, tokens=512, slots=1)

    for bad in (-1, VOCAB_SIZE):
        with pytest.raises(InferenceError, match=f"id {bad} in the prompt"):
            generator.submit(request([bad], rows_of(2), [5]))
    with pytest.raises(InferenceError, match=f"id {FIRST_EMBEDDING} in the prompt"):
        generator.submit(Request([FIRST_EMBEDDING, 5]))
