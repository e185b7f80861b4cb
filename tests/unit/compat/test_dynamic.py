"""Programs for the dynamic generator, as users write them."""

import json
import threading

import pytest
import torch
from small_pages import PAGE_TOKENS

from exl2flow.compat.exllamav2 import ExLlamaV2Cache, ExLlamaV2Cache_Q6, Timer
from exl2flow.compat.exllamav2.generator import (
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Filter,
    ExLlamaV2MMEmbedding,
    ExLlamaV2PrefixFilter,
    ExLlamaV2Sampler,
    ExLlamaV2SelectFilter,
)
from exl2flow.core.errors import ConfigError, ContextOverflow, Exl2FlowError, FilterDeadEnd

Settings = ExLlamaV2Sampler.Settings
GREEDY = Settings.greedy()
PROMPTS = ["The quick brown", "A tokenizer", "Numbers such as 3.14"]
COMMON = {"job", "stage", "serial", "eos"}
END = {
    "text",
    "token_ids",
    "eos_reason",
    "full_completion",
    "new_tokens",
    "prompt_tokens",
    "time_enqueued",
    "time_prefill",
    "time_generate",
    "cached_pages",
    "cached_tokens",
    "held",
}


@pytest.fixture
def generator(model, cache, tokenizer) -> ExLlamaV2DynamicGenerator:
    return ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)


def drained(generator: ExLlamaV2DynamicGenerator) -> list[dict]:
    results = []
    while generator.num_remaining_jobs():
        results += generator.iterate()
    return results


def test_one_prompt_and_many_give_the_text_of_transformers(generator, tokenizer, expected) -> None:
    generator.warmup()

    with Timer() as timer:
        one = generator.generate(PROMPTS[0], max_new_tokens=20, gen_settings=GREEDY, add_bos=True)
    many = generator.generate(PROMPTS, 20, gen_settings=GREEDY, add_bos=True, completion_only=True)

    assert one == PROMPTS[0] + many[0]
    assert timer.interval > 0
    for prompt, text in zip(PROMPTS, many, strict=True):
        ids = expected(tokenizer.encode(prompt, add_bos=True), 20)
        assert text == tokenizer.decode(ids[0])


def test_a_streamed_job_has_the_keys_of_each_stage(generator, tokenizer, expected) -> None:
    ids = tokenizer.encode(PROMPTS[0], add_bos=True)
    job = ExLlamaV2DynamicJob(
        input_ids=ids,
        max_new_tokens=12,
        gen_settings=GREEDY,
        identifier="mine",
        return_probs=True,
        return_top_tokens=3,
        return_logits=True,
    )

    serial = generator.enqueue(job)
    assert (generator.pending_jobs, generator.active_jobs) == ([job], [])
    results = drained(generator)

    *others, last = results
    streaming = [r for r in results if r["stage"] == "streaming"]
    assert [r["stage"] for r in results[:2]] == ["started", "prefill"]
    assert set(results[0]) == COMMON | {"identifier"}
    assert set(results[1]) == COMMON | {"identifier", "curr_progress", "max_progress"}
    assert results[1]["curr_progress"] == results[1]["max_progress"] == ids.shape[1] - 1
    assert all(r["job"] == job and r["serial"] == serial for r in results)
    assert {r["identifier"] for r in results} == {"mine"}
    assert not any(r["eos"] for r in others)
    more = {"token_probs", "top_k_tokens", "top_k_probs", "logits", "identifier"}
    assert set(last) == COMMON | END | more
    assert last["eos_reason"] == "max_new_tokens"
    assert last["held"] == {}
    made = torch.cat([r["token_ids"] for r in streaming if "token_ids" in r], 1)
    assert made.tolist() == expected(ids, 12).tolist()
    assert "".join(r.get("text", "") for r in streaming) == last["full_completion"]
    first = next(r for r in streaming if "token_ids" in r)
    count = first["token_ids"].shape[1]
    assert first["token_probs"].shape == (1, count)
    assert first["top_k_tokens"].shape == first["top_k_probs"].shape == (1, count, 3)
    assert first["logits"].shape == (1, count, 301)
    assert job.sequences[0].input_ids.torch().tolist() == torch.cat([ids, made], 1).tolist()
    assert (last["new_tokens"], last["prompt_tokens"]) == (12, ids.shape[1])


def test_stops_say_what_ended_the_text(generator, tokenizer, expected) -> None:
    ids = tokenizer.encode(PROMPTS[0], add_bos=True)
    text = tokenizer.decode(expected(ids, 20)[0])
    stop_id = int(expected(ids, 20)[0, 5])
    by_string = ExLlamaV2DynamicJob(ids, 20, gen_settings=GREEDY, stop_conditions=[text[4:6]])
    by_id = ExLlamaV2DynamicJob(ids, 20, gen_settings=GREEDY, stop_conditions={stop_id})

    serials = generator.enqueue([by_string, by_id])
    ends = {r["job"]: r for r in drained(generator) if r["eos"]}

    assert serials == [0, 1]
    assert ends[by_string]["eos_triggering_string"] == text[4:6]
    assert ends[by_string]["full_completion"] == text[: text.index(text[4:6])]
    assert ends[by_string]["held"]["text"].startswith(text[4:6])
    assert ends[by_id]["eos_triggering_token_id"] == stop_id
    assert ends[by_id]["held"]["token_ids"].tolist() == [[stop_id]]
    assert {end["eos_reason"] for end in ends.values()} == {"stop_string", "stop_token"}


@pytest.mark.parametrize("count", [80, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_queue_of_identified_jobs_completes(model, tokenizer, count: int) -> None:
    cache = ExLlamaV2Cache(model, max_seq_len=8192)
    generator = ExLlamaV2DynamicGenerator(
        model, cache, tokenizer, max_batch_size=1024, max_q_size=1
    )
    for index in range(count):
        ids = tokenizer.encode(f"Question {index}:")
        generator.enqueue(ExLlamaV2DynamicJob(ids, 2, gen_settings=GREEDY, identifier=index))

    ended = {r["identifier"]: r for r in drained(generator) if r["eos"]}

    assert sorted(ended) == list(range(count))
    assert {r["new_tokens"] for r in ended.values()} == {2}


class SmallPages(ExLlamaV2Cache):
    page_tokens = PAGE_TOKENS


def test_questions_on_one_long_text_share_its_pages(model, tokenizer) -> None:
    cache = SmallPages(model, max_seq_len=16 * PAGE_TOKENS)
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer, max_batch_size=4)
    text = "The quick brown fox jumps over the lazy dog. " * 2
    ids = [tokenizer.encode(text + question) for question in ("Who?", "Where?", "What?")]
    length = min(x.shape[1] for x in ids)
    assert length > 2 * generator.page_size == 2 * PAGE_TOKENS

    first = ExLlamaV2DynamicJob(ids[0], 4)
    generator.enqueue(first)
    drained(generator)
    generator.enqueue([ExLlamaV2DynamicJob(x, 4) for x in ids[1:]])
    ends = [r for r in drained(generator) if r["eos"]]

    assert all(r["cached_pages"] >= 2 for r in ends)
    assert all(r["cached_tokens"] >= 2 * PAGE_TOKENS for r in ends)


def test_banned_strings_are_never_shown(generator, tokenizer) -> None:
    plain = generator.generate(PROMPTS[0], 40, gen_settings=GREEDY, completion_only=True)
    ban = next(plain[i : i + 2] for i in range(8, 20) if plain[i : i + 2].isascii())
    job = ExLlamaV2DynamicJob(
        tokenizer.encode(PROMPTS[0]), 40, gen_settings=GREEDY, banned_strings=[ban.upper()]
    )

    generator.enqueue(job)
    results = drained(generator)

    suppressed = [r for r in results if "suppressed_text" in r]
    assert ban.lower() not in results[-1]["full_completion"].lower()
    assert suppressed
    assert all(r["suppressed_tokens"].shape[0] == 1 for r in suppressed)
    assert results[-1]["new_tokens"] == 40


def test_guidance_from_minus_one_to_two(generator) -> None:
    pair = ("The quick brown fox", "A tokenizer of")
    scales = [-1.0, 0.0, 0.5, 1.0, 2.0]

    texts = generator.generate(
        [pair] * 5,
        16,
        gen_settings=[Settings.greedy(cfg_scale=scale) for scale in scales],
        completion_only=True,
    )
    alone = generator.generate([*pair], 16, gen_settings=GREEDY, completion_only=True)

    assert [texts[3], texts[1]] == alone
    assert len(set(texts)) > 3


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_drafts_after_none_on_one_cache_change_no_text(
    generator, model, cache, tokenizer, kind
) -> None:
    plain = generator.generate(PROMPTS, 24, gen_settings=Settings(), seed=3)
    draft = {"draft_model": model, "draft_cache": ExLlamaV2Cache(model, max_seq_len=4096)}
    options = draft if kind == "model" else {"use_ngram_draft": True}

    drafted = ExLlamaV2DynamicGenerator(model, cache, tokenizer, **options)
    texts, last = drafted.generate(
        PROMPTS, 24, gen_settings=Settings(), seed=3, return_last_results=True
    )
    again = generator.generate(PROMPTS, 24, gen_settings=Settings(), seed=3)

    assert texts == plain == again
    assert all(r["new_tokens"] == 24 for r in last)
    accepted = [r["accepted_draft_tokens"] for r in last]
    assert all(r["rejected_draft_tokens"] >= 0 for r in last)
    assert kind == "ngram" or sum(accepted) > 0


class JsonFilter(ExLlamaV2Filter):
    """Shaped like wrappers of lm-format-enforcer: `{"n":` and digits, then `}`."""

    def __init__(self, model, tokenizer) -> None:
        super().__init__(model, tokenizer)
        self.pieces = tokenizer.get_id_to_piece_list()
        self.ids: list[int] = []

    def begin(self, prefix_str: str = "") -> None:
        self.ids = []

    def feed(self, token: torch.Tensor) -> None:
        self.ids.append(int(token[0][0]))

    def next(self) -> tuple[list[int], list[int]]:
        text = "".join(self.pieces[i] for i in self.ids)
        fits = [i for i, p in enumerate(self.pieces) if p and self.is_begun(text + p)]
        ends = [i for i in fits if (text + self.pieces[i]).endswith("}")]
        return sorted(fits), ends

    def use_background_worker(self) -> bool:
        return True

    @staticmethod
    def is_begun(text: str) -> bool:
        start, rest = '{"n":', text[5:]
        if not rest:
            return start.startswith(text)
        digits = rest.removesuffix("}")
        return text.startswith(start) and digits.isascii() and digits.isdigit() and len(digits) < 6


def test_a_foreign_json_filter_makes_json(generator, model, tokenizer) -> None:
    prompts = ["A number:", "Another one:"]
    texts, last = generator.generate(
        prompts,
        100,
        filters=[[JsonFilter(model, tokenizer)] for _ in prompts],
        seed=5,
        completion_only=True,
        return_last_results=True,
    )

    assert all(json.loads(text)["n"] >= 0 for text in texts)
    assert [r["eos_reason"] for r in last] == ["end_filter"] * 2


def test_prefix_and_select_filters_are_ours(generator, model, tokenizer) -> None:
    prefix = ExLlamaV2PrefixFilter(model, tokenizer, ["Yes", "No"])
    select = ExLlamaV2SelectFilter(model, tokenizer, ["red", "green"], case_insensitive=True)

    first = generator.generate("A:", 8, filters=[prefix], completion_only=True)
    second = generator.generate("A:", 8, filters=[select], completion_only=True)

    assert first.startswith(("Yes", "No"))
    assert second.lower() in ("red", "green")


def test_a_filter_without_methods_is_refused_by_name(generator, model, tokenizer) -> None:
    with pytest.raises(ConfigError, match="lacks `begin`, `feed` or `next`"):
        generator.generate("A", 4, filters=[ExLlamaV2Filter(model, tokenizer)])


def test_an_error_ends_its_job_only(generator, model, tokenizer) -> None:
    class Nothing(JsonFilter):
        def next(self) -> tuple[list[int], list[int]]:
            return [], []

    good = ExLlamaV2DynamicJob(tokenizer.encode(PROMPTS[0]), 4)
    bad = ExLlamaV2DynamicJob(tokenizer.encode(PROMPTS[1]), 4, filters=[Nothing(model, tokenizer)])
    generator.enqueue([good, bad])

    results, errors = [], []
    while generator.num_remaining_jobs():
        try:
            results += generator.iterate()
        except FilterDeadEnd as error:
            errors.append(error)
    results += generator.iterate()

    assert len(errors) == 1
    assert [r["job"] for r in results if r["eos"]] == [good]
    assert "".join(r.get("text", "") for r in results if r["job"] is good) == good.full_completion


def test_hooks_replace_tokens(generator) -> None:
    def hook(seen) -> None:
        assert seen.candidate_tokens.shape == seen.candidate_probs.shape
        assert seen.logits.shape[:2] == (1, 1)
        seen.sampled_token = torch.tensor([[40]])

    settings = Settings(post_sampling_hooks=[hook])
    _, last = generator.generate("A", 3, gen_settings=settings, return_last_results=True)

    assert last["job"].sequences[0].input_ids.torch()[0, -3:].tolist() == [40, 40, 40]


def test_cancelled_jobs_give_no_results_and_free_their_pages(generator, tokenizer) -> None:
    jobs = [ExLlamaV2DynamicJob(tokenizer.encode(p), 100) for p in PROMPTS]
    generator.enqueue(jobs)
    generator.iterate()
    before = generator.native.free_pages

    generator.cancel(jobs[0])
    generator.cancel(jobs[0])
    assert generator.native.free_pages > before
    results = [r["job"] for _ in range(3) for r in generator.iterate()]
    assert generator.num_remaining_jobs() == 2
    generator.clear_queue()
    assert generator.native.free_pages == generator.max_pages

    assert jobs[0] not in results
    assert generator.iterate() == []
    assert sum(page.ref_count for page in generator.all_pages) == 0


def test_an_abort_ends_all_and_returns_nothing(generator) -> None:
    abort = threading.Event()
    abort.set()

    assert generator.generate(PROMPTS, 100, abort_event=abort) is None
    assert generator.num_remaining_jobs() == 0
    assert generator.native.free_pages == generator.max_pages


def test_an_abort_frees_the_pages_of_running_jobs_at_once(generator) -> None:
    class Later(threading.Event):
        def is_set(self) -> bool:
            if len(generator.active_jobs) == len(PROMPTS):
                self.set()
            return super().is_set()

    assert generator.generate(PROMPTS, 100, abort_event=Later()) is None
    assert all(page.ref_count == 0 for page in generator.all_pages)


def test_bias_masks_and_shared_settings_are_kept_apart(generator, tokenizer) -> None:
    settings = Settings(mirostat=True, dry_multiplier=0.8)
    settings.allow_tokens(tokenizer, [40, 41, "f"])

    _, last = generator.generate(PROMPTS, 12, gen_settings=settings, return_last_results=True)
    made = {i for r in last for i in r["job"].sequences[0].input_ids.torch()[0, -12:].tolist()}
    settings.disallow_tokens(tokenizer, [40])
    again = generator.generate("A", 12, gen_settings=settings, return_last_results=True)[1]

    assert made <= {40, 41, tokenizer.single_id("f")}
    assert 40 not in again["job"].sequences[0].input_ids.torch()[0, -12:]
    assert settings.mirostat_mu is None
    with pytest.raises(ConfigError, match="no single token"):
        settings.allow_tokens(tokenizer, ["not one token"])


def test_bad_input_is_refused_by_name(generator, model, tokenizer) -> None:
    ids = tokenizer.encode("A")
    with pytest.raises(ConfigError, match="input_ids"):
        ExLlamaV2DynamicJob(torch.tensor([1, 2]), 4)
    with pytest.raises(ConfigError, match="input_ids"):
        ExLlamaV2DynamicJob(torch.zeros(1, 0, dtype=torch.long), 4)
    for options in ({"stop_conditions": [None]}, {"gen_settings": Settings(cfg_scale=1.0)}):
        with pytest.raises(ConfigError):
            generator.enqueue(ExLlamaV2DynamicJob(ids, 4, **options))
    with pytest.raises(ContextOverflow):
        generator.enqueue(ExLlamaV2DynamicJob(ids, 4000))
    with pytest.raises(ConfigError, match="3 prompts"):
        generator.generate(PROMPTS, 4, gen_settings=[GREEDY])
    with pytest.raises(ConfigError, match="draft_cache"):
        ExLlamaV2DynamicGenerator(model, generator.cache, tokenizer, draft_model=model)
    with pytest.raises(ConfigError, match="multiple of 256"):
        ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=300), tokenizer)
    assert generator.num_remaining_jobs() == 0
    assert issubclass(ConfigError, Exl2FlowError)


def test_caches_of_all_formats_generate(model, tokenizer) -> None:
    cache = ExLlamaV2Cache_Q6(model, max_seq_len=512)
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer, paged=False, max_chunk_size=256)

    assert len(generator.generate("A", 8, stop_conditions=None, return_last_results=True)) == 2
    assert cache.footprint()[0] < ExLlamaV2Cache(model, max_seq_len=512).footprint()[0]
    generator.reset_page_table()


def test_embeddings_take_the_place_of_tokens(generator, model, tokenizer) -> None:
    ids = tokenizer.encode("quick brown fox")
    alone = generator.generate("A quick brown foxYes", 8, gen_settings=GREEDY)
    image = ExLlamaV2MMEmbedding(model, model.native.decoder.embed(ids), text_alias="<image>")

    texts = generator.generate(
        ["A <image>Yes", "A <image>Yes", "A quick brown foxYes"],
        8,
        gen_settings=GREEDY,
        embeddings=[[image], [image, image], None],
        completion_only=True,
    )

    joined = torch.cat([tokenizer.encode("A "), ids, tokenizer.encode("Yes")], 1)
    job = ExLlamaV2DynamicJob(joined, 8, gen_settings=GREEDY)
    generator.enqueue(job)
    drained(generator)
    assert texts[:2] == [job.full_completion] * 2
    assert alone.endswith(texts[2])


def test_a_job_that_is_enqueued_again_begins_its_text_anew(generator, tokenizer) -> None:
    job = ExLlamaV2DynamicJob(tokenizer.encode(PROMPTS[0]), 8, gen_settings=GREEDY)
    generator.enqueue(job)
    first = drained(generator)[-1]["full_completion"]

    generator.enqueue(job)

    assert (generator.pending_jobs, generator.active_jobs) == ([job], [])
    assert drained(generator)[-1]["full_completion"] == first == job.full_completion
