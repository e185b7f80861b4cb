"""Programs with a loop of their own: `forward` with a cache, and `ExLlamaV2Sampler.sample`."""

import random
import threading

import pytest
import torch
from adapters import make_adapter, merged
from bounds import near, terms_of
from transformers import AutoModelForCausalLM

from exl2flow.compat.exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Config,
    ExLlamaV2Lora,
)
from exl2flow.compat.exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Filter,
    ExLlamaV2PrefixFilter,
    ExLlamaV2Sampler,
    ExLlamaV2SelectFilter,
    ExLlamaV2StreamingGenerator,
)
from exl2flow.core.errors import (
    ConfigError,
    ContextOverflow,
    FilterDeadEnd,
    InferenceError,
    SourceModelError,
)

Settings = ExLlamaV2Sampler.Settings
GREEDY = Settings.greedy()
PROMPT = "The quick brown fox jumps"
PROMPTS = [PROMPT, "A"]


@pytest.fixture(scope="module")
def reference(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def logits(ids: torch.Tensor, **options) -> torch.Tensor:
        return model(ids, **options).logits

    return logits


def close(model: ExLlamaV2, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare logits of texts below 256 tokens, with keys and values in fp32."""
    bound = near(expected, terms_of(model.native.spec, 256))
    torch.testing.assert_close(found, expected, **bound)


def loop(model, tokenizer, cache, prompt: str, settings, count: int, seed: int = 0, **options):
    """Return what a program makes that samples by itself."""
    drawn, ids = random.Random(seed), tokenizer.encode(prompt)
    first = ids.shape[1]
    cache.current_seq_len = 0
    model.forward(ids[:, :-1], cache, preprocess_only=True)
    for _ in range(count):
        logits = model.forward(ids[:, -1:], cache).float().cpu()
        token, _, _, prob, end = ExLlamaV2Sampler.sample(
            logits, settings, ids, drawn.random(), tokenizer, **options
        )
        assert 0 < prob[0, 0] <= 1
        ids = torch.cat([ids, token], dim=1)
        for each in options.get("filters", ()):
            each.feed(token)
        if end or token.item() == tokenizer.eos_token_id:
            break
    return ids[:, first:]


def test_logits_of_all_and_of_last_positions_are_those_of_transformers(
    model, cache, tokenizer, reference
) -> None:
    ids = tokenizer.encode(PROMPT * 20)  # several pages
    expected, cut = reference(ids), ids.shape[1] - 70

    first = model.forward(ids[:, :cut], cache)
    assert cache.current_seq_len == cut
    last = model.forward(ids[:, cut:-1], cache, last_id_only=True, cpu_logits=True)
    logits, state = model.forward(ids[:, -1:], cache, return_last_state=True)

    assert cache.current_seq_len == ids.shape[1]
    close(model, first, expected[:, :cut])
    close(model, last, expected[:, -2:-1])
    close(model, logits, expected[:, -1:])
    assert state.shape == (1, 1, 64)


def test_a_program_goes_back_to_an_earlier_place(model, cache, tokenizer, reference) -> None:
    ids, other = tokenizer.encode(PROMPT), tokenizer.encode(" over there")
    assert model.forward(ids, cache, preprocess_only=True) is None
    copied = cache.clone()

    cache.current_seq_len = 3
    found = model.forward(other, cache)
    again = model.forward(other, copied)
    cache.reset()
    anew = model.forward(other, cache)

    close(model, found, reference(torch.cat([ids[:, :3], other], 1))[:, 3:])
    close(model, again, reference(torch.cat([ids, other], 1))[:, ids.shape[1] :])
    close(model, anew, reference(other))


@pytest.mark.parametrize("has_cache", [True, False])
def test_padded_rows_have_the_logits_of_rows_alone(model, tokenizer, reference, has_cache) -> None:
    ids, offsets = tokenizer.encode(PROMPTS, return_offsets=True)
    mask = tokenizer.padding_mask(ids)
    given = {"input_mask": mask, "position_offsets": offsets}

    if has_cache:
        cache = ExLlamaV2Cache(model, batch_size=2, max_seq_len=256)
        model.forward(ids[:, :-1], cache, preprocess_only=True, **given)  # pads of "A" alone
        found = model.forward(ids[:, -1:], cache, **given)
    else:
        found = model.forward(ids, **given)[:, -1:]

    close(model, found[:1], reference(tokenizer.encode(PROMPTS[0]))[:, -1:])
    close(model, found[1:], reference(tokenizer.encode(PROMPTS[1]))[:, -1:])


def test_states_are_copied_from_one_prompt_to_a_batch(model, tokenizer, reference) -> None:
    one = ExLlamaV2Cache(model, max_seq_len=256)
    batch = ExLlamaV2Cache(model, batch_size=3, max_seq_len=256)
    ids, count = tokenizer.encode(PROMPT), tokenizer.encode(PROMPT).shape[1]
    model.forward(ids, one, preprocess_only=True)

    one.copy_states(batch, 0, count, 0, count, 0, 1, 0, 3)
    batch.current_seq_len = count
    new = torch.tensor([[40], [41], [42]])
    found = model.forward(new, batch)

    close(model, found, reference(torch.cat([ids.expand(3, -1), new], 1))[:, -1:])


def test_forward_takes_loras(model, cache, tokenizer, folder, tmp_path) -> None:
    adapter = make_adapter(tmp_path / "lora", folder)
    changed = ExLlamaV2(ExLlamaV2Config(str(merged(tmp_path / "merged", folder, adapter))))
    changed.load()
    lora, ids = ExLlamaV2Lora.from_directory(model, str(adapter)), tokenizer.encode(PROMPT)
    plain = model.forward(ids, cache)
    cache.reset()

    found = model.forward(ids, cache, loras=[lora])

    close(model, found, changed.forward(ids))
    assert (found - plain).abs().max() > 1e-2


def test_forward_refuses_what_it_cannot_do(model, cache, tokenizer) -> None:
    abort, ids = threading.Event(), tokenizer.encode(PROMPT)
    abort.set()
    assert model.forward(ids, cache, abort_event=abort) is None
    assert cache.current_seq_len == 0

    with pytest.raises(ContextOverflow, match="1 rows of 4096"):
        model.forward(ids.expand(2, -1), cache)
    with pytest.raises(ContextOverflow, match="256"):
        model.forward(torch.zeros(1, 257, dtype=torch.long), ExLlamaV2Cache(model, 1, 256))
    with pytest.raises(SourceModelError, match="999"):
        model.forward(torch.tensor([[999]]), cache)
    cache.current_seq_len = 5
    with pytest.raises(ConfigError, match="current_seq_len"):
        model.forward(ids, cache)


def test_a_greedy_loop_gives_the_text_of_the_generators(model, tokenizer, expected) -> None:
    cache, ids = ExLlamaV2Cache(model, max_seq_len=512), tokenizer.encode(PROMPT)
    made = loop(model, tokenizer, cache, PROMPT, GREEDY, 20)
    base = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    dynamic = ExLlamaV2DynamicGenerator(model, cache, tokenizer)

    assert made.tolist() == expected(ids, 20).tolist()
    assert base.generate_simple(PROMPT, GREEDY, 20) == PROMPT + tokenizer.decode(made)[0]
    assert dynamic.generate(PROMPT, 20, gen_settings=GREEDY) == PROMPT + tokenizer.decode(made)[0]


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(temperature=2.0, top_k=0, top_p=0.95, min_p=0.02, token_repetition_penalty=1.3),
        Settings(mirostat=True, dry_multiplier=0.8, xtc_probability=0.3),
    ],
    ids=["default", "hot", "rich"],
)
def test_a_loop_of_equal_draws_gives_the_text_of_a_job(model, tokenizer, settings) -> None:
    cache = ExLlamaV2Cache_Q4(model, max_seq_len=512)
    made = loop(model, tokenizer, cache, PROMPT, settings.clone(), 24, seed=5)
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)

    _, last = generator.generate(
        PROMPT, 24, gen_settings=settings, seed=5, return_last_results=True
    )

    [text], [made] = last["job"].sequences[0].input_ids.torch()[:, -24:].tolist(), made.tolist()
    assert text[: len(made)] == made
    assert len(made) == 24 or made[-1] == tokenizer.eos_token_id


def test_a_stream_is_continued_by_a_loop(model, tokenizer, expected) -> None:
    cache, ids = ExLlamaV2Cache(model, max_seq_len=512), tokenizer.encode(PROMPT)
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    generator.set_stop_conditions([])
    generator.begin_stream_ex(ids, GREEDY)
    for _ in range(6):
        generator.stream_ex()

    ids = generator.sequence_ids
    while ids.shape[1] < 40:
        logits = model.forward(ids[:, cache.current_seq_len :], cache, last_id_only=True)
        token, *_ = ExLlamaV2Sampler.sample(logits, GREEDY, ids, 0.5, tokenizer)
        ids = torch.cat([ids, token], dim=1)

    first = tokenizer.encode(PROMPT).shape[1]
    assert ids[:, first:].tolist() == expected(ids[:, :first], 40 - first).tolist()


def test_a_sample_has_top_tokens_with_their_probabilities(tokenizer) -> None:
    logits = torch.full((2, 1, 301), -20.0)
    logits[:, 0, [40, 41, 42]] = torch.tensor([0.5, 0.3, 0.2]).log()
    ids, settings = torch.tensor([[5], [6]]), Settings(temperature=1.0, top_p=0.0)

    tokens, top_ids, top_probs, probs, end = ExLlamaV2Sampler.sample(
        logits, settings, ids, 0.6, tokenizer, return_top_tokens=3
    )
    drawn = random.Random(1)
    counts = {40: 0, 41: 0, 42: 0}
    for _ in range(200):
        token, none, *_ = ExLlamaV2Sampler.sample(
            logits[:1], settings, ids[:1], drawn.random(), tokenizer
        )
        counts[token.item()] += 1

    shares = torch.tensor([0.5, 0.3, 0.2])
    assert tokens.shape == probs.shape == (2, 1)
    assert none.shape == (1, 1, 0)
    assert top_ids[:, 0].tolist() == [[40, 41, 42]] * 2
    torch.testing.assert_close(top_probs[0, 0], shares, **near(shares, 1))
    torch.testing.assert_close(probs[:, 0], shares[tokens[:, 0] - 40], **near(shares, 1))
    torch.testing.assert_close(torch.tensor([*counts.values()]) / 200, shares, atol=0.1, rtol=0)
    assert end is False


def test_a_sample_keeps_to_blocks_biases_guidance_and_healing(tokenizer) -> None:
    logits, ids = torch.zeros(1, 1, 301), torch.tensor([[5]])
    logits[..., 40], logits[..., 41] = 9.0, 8.0
    settings = GREEDY.clone()
    settings.disallow_tokens(tokenizer, [40])
    prefix = tokenizer.encode("e")
    healed = tokenizer.native.healing(prefix.item())
    guided = Settings.greedy(cfg_scale=0.0)
    other = logits.clone()
    other[..., 50] = 99.0

    def token(given=logits, settings=GREEDY, ids=ids, **options) -> int:
        return ExLlamaV2Sampler.sample(given, settings, ids, 0.5, tokenizer, **options)[0].item()

    assert (token(), token(blocked_tokens=[40]), token(settings=settings)) == (40, 41, 41)
    assert token(torch.cat([logits, other]), guided, ids.expand(2, -1)) == 50
    assert token(prefix_token=prefix) in healed
    with pytest.raises(InferenceError, match="not finite"):
        token(torch.full((1, 1, 301), torch.nan))


class Digits(ExLlamaV2Filter):
    """Three digits, as users write filters."""

    def __init__(self, model, tokenizer) -> None:
        super().__init__(model, tokenizer)
        self.ids = [
            i for i, p in enumerate(tokenizer.get_id_to_piece_list()) if p in {*"0123456789"}
        ]

    def begin(self, prefix_str: str = "") -> None:
        self.count = 0

    def feed(self, token: torch.Tensor) -> None:
        self.count += 1

    def next(self) -> tuple[list[int], list[int]]:
        return self.ids, self.ids if self.count == 2 else []


def test_a_loop_feeds_its_filters(model, cache, tokenizer) -> None:
    texts = []
    for each in (
        Digits(model, tokenizer),
        ExLlamaV2SelectFilter(model, tokenizer, ["red", "green"]),
        ExLlamaV2PrefixFilter(model, tokenizer, "Yes, "),
    ):
        each.begin("")
        made = loop(model, tokenizer, cache, PROMPT, Settings(), 12, filters=[each])
        texts.append(tokenizer.decode(made)[0])
    each = Digits(model, tokenizer)
    each.begin("")

    assert texts[0].isdigit()
    assert len(texts[0]) == 3
    assert texts[1] in ("red", "green")
    assert texts[2].startswith("Yes, ")
    with pytest.raises(FilterDeadEnd):
        loop(
            model, tokenizer, cache, PROMPT, Settings(), 1, filters=[each], blocked_tokens=each.ids
        )


def test_eos_is_preferred_where_filters_allow_it(tokenizer) -> None:
    class Any(Digits):
        def next(self):
            return [*self.ids, tokenizer.eos_token_id], []

    token, *_ = ExLlamaV2Sampler.sample(
        torch.zeros(1, 1, 301),
        Settings(),
        torch.tensor([[5]]),
        0.5,
        tokenizer,
        filters=[Any(None, tokenizer)],
        filter_prefer_eos=True,
    )

    assert token.item() == tokenizer.eos_token_id


def test_pages_show_what_the_cache_holds(model, cache, tokenizer, capsys) -> None:
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    ids = tokenizer.encode(PROMPT * 14)
    assert ids.shape[1] > generator.page_size
    generator.enqueue(ExLlamaV2DynamicJob(ids, 40))
    for _ in range(4):
        generator.iterate()

    pages = generator.all_pages
    generator.print_page_list()

    assert [page.page_index for page in pages] == [*range(generator.max_pages)]
    assert sum(page.ref_count for page in pages) == -(-ids.shape[1] // 256)
    [full] = [page for page in pages if page.kv_position == 256]
    assert full.sequence.tolist() == ids[:, :256].tolist()
    assert [page.kv_position for page in pages if page.prev_hash == full.phash] != []
    assert len({page.phash for page in pages}) == len(pages)
    assert f"page {full.page_index}: 256 tokens, 1 users" in capsys.readouterr().out
    generator.clear_queue()
