"""Programs for the streaming generator: one text, token by token, on one cache."""

import pytest
import torch

from exl2flow.compat.exllamav2 import ExLlamaV2Cache
from exl2flow.compat.exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exl2flow.core.errors import ConfigError, ContextOverflow

Settings = ExLlamaV2Sampler.Settings
GREEDY = Settings.greedy()
PROMPT = "The quick brown"


@pytest.fixture
def generator(model, tokenizer) -> ExLlamaV2StreamingGenerator:
    cache = ExLlamaV2Cache(model, max_seq_len=512)
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    generator.set_stop_conditions([])
    return generator


def streamed(generator, ids, settings=GREEDY, *, most: int = 20, **options):
    generator.begin_stream_ex(ids, settings, **options)
    found = []
    while sum(r["chunk_token_ids"].shape[1] for r in found) < most:
        found.append(generator.stream_ex())
        if found[-1]["eos"]:
            break
    return found


def ids_of(found) -> list[int]:
    return torch.cat([r["chunk_token_ids"] for r in found], 1)[0].tolist()


def test_greedy_text_is_that_of_transformers(generator, tokenizer, expected) -> None:
    ids = tokenizer.encode(PROMPT)
    found = streamed(
        generator, ids, return_probabilities=True, return_top_tokens=2, return_logits=True
    )

    made = ids_of(found)
    assert made == expected(ids, len(made))[0].tolist()
    assert generator.sequence_ids[0, : ids.shape[1] + len(made)].tolist() == ids[0].tolist() + made
    first = next(r for r in found if r["chunk_token_ids"].numel())
    assert set(first) == {
        "chunk", "eos", "chunk_token_ids", "probs", "top_tokens", "top_probs", "logits"
    }  # fmt: skip
    assert first["logits"].shape == (1, first["chunk_token_ids"].shape[1], 301)


def test_stops_end_the_stream_with_the_text_before_them(generator, tokenizer, expected) -> None:
    ids = tokenizer.encode(PROMPT)
    row = expected(ids, 20)[0]
    text = tokenizer.decode(row)
    stop = int(row[6])
    assert ExLlamaV2StreamingGenerator(generator.model, generator.cache, tokenizer).stop_tokens == {
        tokenizer.eos_token_id
    }

    generator.set_stop_conditions({stop})
    by_id = streamed(generator, ids)
    generator.set_stop_conditions([text[5:8]])
    by_string = streamed(generator, ids)

    kept = row[: row.tolist().index(stop)]
    assert by_id[-1]["eos"]
    assert ids_of(by_id) == kept.tolist()
    assert "".join(r["chunk"] for r in by_string) == text[: text.index(text[5:8])]
    assert ids_of(by_string) == row[: len(ids_of(by_string))].tolist()
    assert tokenizer.decode(torch.tensor(ids_of(by_string))) == text[: text.index(text[5:8])]


def test_legacy_streams_with_mask_and_offsets_are_guided(generator, tokenizer) -> None:
    prompts = [PROMPT, "A tokenizer of a tiny model"]
    ids, offsets = tokenizer.encode(prompts, return_offsets=True)
    mask = tokenizer.padding_mask(ids)
    texts = []

    for scale, given in (
        (1.0, {"input_mask": mask, "position_offsets": offsets}),
        (1.0, {"input_mask": mask}),
        (0.0, {"position_offsets": offsets}),
    ):
        generator.begin_stream(ids, Settings.greedy(cfg_scale=scale), **given)
        texts.append("".join(generator.stream()[0] for _ in range(12)))
    alone = []
    for prompt in prompts:
        generator.begin_stream(tokenizer.encode(prompt), GREEDY)
        alone.append("".join(generator.stream()[0] for _ in range(12)))

    assert texts == [alone[0], alone[0], alone[1]]


def test_banned_tokens_hold_for_a_step(generator, tokenizer, expected) -> None:
    ids = tokenizer.encode(PROMPT)
    row = expected(ids, 3)[0].tolist()

    generator.begin_stream_ex(ids, GREEDY)
    first = [int(i) for i in generator.stream_ex()["chunk_token_ids"][0]]
    generator.begin_stream_ex(ids, GREEDY)
    banned = generator.stream_ex(ban_tokens=[row[0]])
    sequence = generator.sequence_ids[0, ids.shape[1] :].tolist()

    assert first in ([row[0]], [])
    assert sequence[0] != row[0]
    assert set(banned) >= {"chunk", "eos", "chunk_token_ids"}


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_drafts_change_no_text_and_are_counted(generator, model, tokenizer, kind) -> None:
    ids = tokenizer.encode(PROMPT)
    plain = ids_of(streamed(generator, ids, most=30))[:30]
    other = ExLlamaV2StreamingGenerator(
        model, generator.cache, tokenizer, *([model, None] if kind == "model" else [])
    )
    other.set_stop_conditions([])
    other.speculative_ngram = kind == "ngram"
    other.speculative_prob_threshold = 0.0
    other.ngram_preload(ids)

    drafted = ids_of(streamed(other, ids, most=30))[:30]
    efficiency, accuracy, total, tried, accepted = other.get_sd_stats()

    assert drafted == plain
    assert 0 <= accepted <= tried
    assert efficiency == accepted / total
    assert kind == "ngram" or accuracy > 0.9
    other.reset_sd_stats()
    assert other.get_sd_stats()[2:] == (0, 0, 0)


def test_a_chat_goes_on_where_it_was(generator, tokenizer) -> None:
    context = tokenizer.encode("User: Hello. " * 20)
    for _ in range(3):
        found = streamed(generator, context, Settings(), most=8)
        answer = torch.cat([r["chunk_token_ids"] for r in found], 1)
        context = torch.cat([context, answer, tokenizer.encode("\nUser: More.")], 1)

    [job] = generator._jobs
    assert job.native.statistics().cached_tokens > 100


def test_a_full_text_ends_without_eos_and_cannot_go_on(generator, tokenizer) -> None:
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 18)[:, :505]
    found = streamed(generator, ids, most=7)

    assert not any(r["eos"] for r in found)
    assert generator.full()
    with pytest.raises(ContextOverflow, match="512"):
        generator.stream_ex()
    with pytest.raises(ConfigError, match="begin_stream"):
        ExLlamaV2StreamingGenerator(generator.model, generator.cache, tokenizer).stream_ex()


def test_several_generators_share_a_cache_one_after_another(generator, model, tokenizer) -> None:
    base = ExLlamaV2BaseGenerator(model, generator.cache, tokenizer)
    dynamic = ExLlamaV2DynamicGenerator(model, generator.cache, tokenizer)
    ids = tokenizer.encode(PROMPT)
    first = "".join(r["chunk"] for r in streamed(generator, ids, most=5))  # and is left there

    text = base.generate_simple(PROMPT, GREEDY, 12, stop_token=None, completion_only=True)
    assert generator.stream_ex()["eos"]
    second = "".join(r["chunk"] for r in streamed(generator, ids, most=5))
    third = dynamic.generate(PROMPT, 12, gen_settings=GREEDY, completion_only=True)

    assert text.startswith(first)
    assert first == second
    assert third == text
    assert len(base.generate_simple([PROMPT] * 2, GREEDY, 4)) == 2


def test_banned_strings_are_suppressed(generator, tokenizer, expected) -> None:
    ids = tokenizer.encode(PROMPT)
    text = tokenizer.decode(expected(ids, 20)[0])
    ban = next(text[i : i + 2] for i in range(4, 18) if text[i : i + 2].isascii())

    found = streamed(generator, ids, most=25, banned_strings=[ban])

    assert any("suppressed" in r for r in found)
    assert ban.lower() not in "".join(r["chunk"] for r in found).lower()
