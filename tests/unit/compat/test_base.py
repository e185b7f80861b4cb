"""Programs for the base generator: one or several prompts, blocking."""

import threading

import pytest
import torch

from exl2flow.compat.exllamav2 import ExLlamaV2Cache
from exl2flow.compat.exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2Sampler,
    ExLlamaV2SelectFilter,
)
from exl2flow.core.errors import ConfigError

Settings = ExLlamaV2Sampler.Settings
GREEDY = Settings.greedy()
PROMPTS = ["The quick brown", "A tokenizer", "Numbers such as 3.14"]


@pytest.fixture
def generator(model, tokenizer) -> ExLlamaV2BaseGenerator:
    cache = ExLlamaV2Cache(model, batch_size=3, max_seq_len=512)
    return ExLlamaV2BaseGenerator(model, cache, tokenizer)


def test_greedy_text_is_that_of_transformers(generator, tokenizer, expected) -> None:
    generator.warmup()
    assert generator.sequence_ids is None
    assert not generator.full()

    one = generator.generate_simple(PROMPTS[0], GREEDY, 20, stop_token=None)
    many = generator.generate_simple(PROMPTS, GREEDY, 20, stop_token=None, completion_only=True)

    for prompt, text in zip(PROMPTS, many, strict=True):
        assert text == tokenizer.decode(expected(tokenizer.encode(prompt), 20)[0])
    assert one == PROMPTS[0] + many[0]
    assert generator.sequence_ids.shape[0] == 3
    assert [generator.tokenizer.decode(ids) for ids in generator.sequence_ids[:1]] == [one]


def test_a_stop_token_ends_a_row_and_pads_follow(generator, tokenizer, expected) -> None:
    rows = [expected(tokenizer.encode(prompt), 12)[0].tolist() for prompt in PROMPTS]
    stop = next(i for i in rows[0][3:] if i not in rows[1] and i not in rows[2])

    texts = generator.generate_simple(PROMPTS, GREEDY, 12, stop_token=stop, completion_only=True)

    made = rows[0][: rows[0].index(stop)]
    assert texts[0] == tokenizer.decode(torch.tensor(made))
    assert generator.sequence_ids[0, -1] == tokenizer.pad_token_id
    assert generator.sequence_ids[1, -12:].tolist() == rows[1]


def test_long_prompts_lose_their_beginning(generator, tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 18
    ids = tokenizer.encode(text)[:, -(512 - 30) :]

    full = generator.generate_simple(text, GREEDY, 30, stop_token=None)

    assert full.startswith(tokenizer.decode(ids[0]))
    assert generator.full()
    assert generator.sequence_ids.shape == (1, 512)


def test_guidance_seeds_healing_and_filters(generator, model, tokenizer) -> None:
    a, b = PROMPTS[:2]
    alone = generator.generate_simple(a, GREEDY, 12, completion_only=True)
    guided = generator.generate_simple([a, b], Settings.greedy(cfg_scale=1.0), 12)
    seeded = [generator.generate_simple(PROMPTS, Settings(), 12, seed=s) for s in (1, 1, 2)]
    healed = generator.generate_simple("The quick bro", GREEDY, 12, token_healing=True)
    chosen = generator.generate_simple(
        a,
        GREEDY,
        12,
        completion_only=True,
        filters=[ExLlamaV2SelectFilter(model, tokenizer, ["red", "green"])],
    )

    assert guided == [a + alone, b + alone]
    assert seeded[0] == seeded[1] != seeded[2]
    assert healed.startswith("The quick bro")
    assert chosen in ("red", "green")


def test_an_abort_returns_the_text_so_far(generator) -> None:
    abort = threading.Event()
    abort.set()  # cleared on entry

    def hook(seen) -> None:
        seen.sampled_token = torch.tensor([[40]])
        abort.set()

    text = generator.generate_simple(
        "A", Settings(post_sampling_hooks=[hook]), 100, abort_event=abort, completion_only=True
    )
    assert generator.abort_event is abort
    hooks = [lambda _: generator.abort_event.set()]  # as another thread does
    other = generator.generate_simple(
        "A",
        Settings(post_sampling_hooks=hooks),
        100,
        abort_event=threading.Event(),
        completion_only=True,
        stop_token=None,
    )
    native = generator.cache.generator()

    assert len(other) < 5
    assert native.free_pages == native.pages
    assert set(text) == {generator.tokenizer.decode(torch.tensor([40]))}
    assert 0 < len(text) < 5


def test_embeddings_take_the_place_of_a_marker(generator, model, tokenizer) -> None:
    ids = tokenizer.encode("quick brown fox")
    rows = model.native.decoder.embed(ids)  # (1, n, hidden)
    plain = tokenizer.decode(tokenizer.encode("A:")[0])

    text = generator.generate_simple(
        "A: {{EMBED_HERE}} Yes", GREEDY, 8, input_embeddings=rows, completion_only=True
    )
    joined = torch.cat([tokenizer.encode("A:"), ids, tokenizer.encode("Yes")], 1)
    expected = generator._begin(1, None)
    from exl2flow.inference import Request, SamplingSettings

    events = expected.native.stream(
        Request(joined[0].tolist(), max_new_tokens=8, settings=SamplingSettings.greedy())
    )
    assert text == "".join(event.text for event in events)
    assert plain == "A:"


@pytest.mark.parametrize("scale", [None, 1.5])
def test_one_row_of_embeddings_serves_all_prompts(generator, model, tokenizer, scale) -> None:
    rows = model.native.decoder.embed(tokenizer.encode("quick brown fox"))  # (1, n, hidden)
    prompts, settings = ["A {{EMBED_HERE}} Yes", "B: {{EMBED_HERE}}No"], Settings.greedy()
    settings.cfg_scale = scale

    one = generator.generate_simple(prompts, settings, 6, input_embeddings=rows)
    each = generator.generate_simple(prompts, settings, 6, input_embeddings=rows.expand(2, -1, -1))

    assert one == each
    assert one[0] != one[1]
    with pytest.raises(ConfigError, match="for 3 prompts, and there are 2"):
        generator.generate_simple(prompts, settings, 6, input_embeddings=rows.expand(3, -1, -1))


@pytest.mark.parametrize("more", [0, 1])
def test_more_tokens_than_a_text_can_have_are_refused_by_name(generator, more: int) -> None:
    longest = generator.max_tokens

    with pytest.raises(ConfigError, match=f"`num_tokens` is {longest + more}; .* {longest - 1}"):
        generator.generate_simple("A", GREEDY, longest + more)


def test_a_clone_of_settings_shares_nothing_that_changes(tokenizer) -> None:
    settings = Settings(post_sampling_hooks=[print], dry_sequence_breakers={1})
    settings.filters = [object()]  # as programs for older versions do
    settings.disallow_tokens(tokenizer, [5])

    clone = settings.clone()
    clone.post_sampling_hooks.append(repr)
    clone.filters.append(None)
    clone.dry_sequence_breakers.add(2)
    clone.disallow_tokens(tokenizer, [6])

    assert settings.post_sampling_hooks == [print]
    assert settings.dry_sequence_breakers == {1}
    assert settings.filters == clone.filters[:1]
    assert settings.token_bias[6] == 0
    assert clone.token_bias[5] == settings.token_bias[5] < 0
