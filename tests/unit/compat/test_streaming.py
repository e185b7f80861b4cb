"""Programs for the streaming generator: one text, token by token, on one cache."""

import threading

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
from exl2flow.core.requests.request import FIRST_EMBEDDING
from exl2flow.engine.generate.device_slots import DeviceSlots

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
        "chunk",
        "eos",
        "chunk_token_ids",
        "probs",
        "top_tokens",
        "top_probs",
        "logits",
    }
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


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the device work while the host reads, as a GPU does, or not."""
    monkeypatch.setattr(DeviceSlots, "is_asynchronous", property(lambda _: request.param))


@pytest.mark.usefixtures("ahead")
def test_bans_that_change_from_call_to_call_apply_to_their_call(generator, tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    free = ids_of(streamed(generator, ids, most=8))

    def made(bans: dict[int, list[int]]) -> list[int]:
        generator.begin_stream_ex(ids, GREEDY)
        for call in range(8):
            generator.stream_ex(ban_tokens=bans.get(call))
            assert generator.sequence_ids.shape[1] == ids.shape[1] + call + 1
        return generator.sequence_ids[0, ids.shape[1] :].tolist()

    only = {token: [i for i in range(299) if i != token] for token in (40, 41)}
    once = made({3: [free[3]]})
    several = made({0: only[40], 3: only[41], 4: only[40], 6: only[41]})

    assert made({}) == free[:8]
    assert once[:3] == free[:3]
    assert once[3] != free[3]
    assert [several[call] for call in (0, 3, 4, 6)] == [40, 41, 40, 41]
    assert not {40, 41} & {several[call] for call in (1, 2, 5, 7)}  # nothing is banned there


@pytest.mark.usefixtures("ahead")
def test_bans_apply_to_their_call_with_a_draft_model(generator, model, tokenizer) -> None:
    other = ExLlamaV2StreamingGenerator(model, generator.cache, tokenizer, model, None)
    other.set_stop_conditions([])
    other.speculative_prob_threshold = 0.0
    ids = tokenizer.encode(PROMPT)
    other.begin_stream_ex(ids, GREEDY)
    for _ in range(7):
        other.stream_ex()
    while other._results:  # tokens that the draft has won
        other.stream_ex()
    count = other.sequence_ids.shape[1]

    for token in (40, 41, 42, 43):
        other.stream_ex(ban_tokens=[i for i in range(299) if i != token])

    assert other.sequence_ids[0, count:].tolist() == [40, 41, 42, 43]
    assert other.get_sd_stats()[4] > 0


@pytest.mark.usefixtures("ahead")
def test_stops_and_settings_apply_to_the_call_after_they_change(generator, tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    free = ids_of(streamed(generator, ids, most=8))

    generator.begin_stream_ex(ids, GREEDY)
    for _ in range(3):
        generator.stream_ex()
    generator.set_stop_conditions([free[3]])
    stopped = generator.stream_ex()
    text = generator.sequence_ids[0, ids.shape[1] :].tolist()
    generator.set_stop_conditions([])
    settings = GREEDY.clone()
    generator.begin_stream_ex(ids, settings)
    for _ in range(3):
        generator.stream_ex()
    settings.disallow_tokens(tokenizer, [free[3]])
    generator.stream_ex()
    settings.allow_tokens(tokenizer, [40])
    generator.stream_ex()
    settings.token_bias[[40, 41]] = torch.tensor([-torch.inf, 0.0])
    generator.stream_ex(ban_tokens=[50])
    settings.token_bias = None
    settings.post_sampling_hooks = [
        lambda seen: setattr(seen, "sampled_token", torch.tensor([[42]]))
    ]
    generator.stream_ex(ban_tokens=[50])
    made = generator.sequence_ids[0, ids.shape[1] :].tolist()

    assert stopped["eos"]
    assert text == free[:3]
    assert made[:3] == free[:3]
    assert made[3] not in (free[3], 40)
    assert made[4:] == [40, 41, 42]


def test_requested_keys_are_there_while_text_is_held(generator, tokenizer, expected) -> None:
    ids = tokenizer.encode(PROMPT)
    text = tokenizer.decode(expected(ids, 20)[0])
    generator.set_stop_conditions([char + "\0" for char in set(text)])  # each token is held

    generator.begin_stream_ex(
        ids, GREEDY, return_probabilities=True, return_top_tokens=3, return_logits=True
    )
    found = [generator.stream_ex() for _ in range(20)]
    generator.begin_stream(ids, GREEDY, return_probabilities=True)
    tuples = [generator.stream() for _ in range(20)]

    counts = [r["chunk_token_ids"].shape[1] for r in found]
    assert 0 in counts
    for count, result in zip(counts, found, strict=True):
        assert result["probs"].shape == (1, count)
        assert result["top_tokens"].shape == result["top_probs"].shape == (1, count, 3)
        assert result["logits"].shape == (1, count, 301)
    for name in ("chunk_token_ids", "probs", "top_tokens", "top_probs", "logits"):
        assert len({result[name].dtype for result in found}) == 1
    assert {len(found) for found in tuples} == {4}


def test_chunks_do_not_repeat_the_healed_token(generator, tokenizer) -> None:
    ids = tokenizer.encode("The qu")

    found = streamed(
        generator, ids, most=6, token_healing=True, return_probabilities=True, return_logits=True
    )

    [job] = generator._jobs
    assert job.native.prompt.healed is not None
    made = ids_of(found)
    assert generator.sequence_ids[0, ids.shape[1] :][: len(made)].tolist() == made
    assert torch.cat([r["probs"] for r in found], 1).shape == (1, len(made))
    assert torch.cat([r["logits"] for r in found], 1).shape == (1, len(made), 301)
    text = tokenizer.decode(generator.sequence_ids[0])
    assert text.startswith("The qu" + "".join(r["chunk"] for r in found))


def test_an_abort_of_a_legacy_stream_frees_its_pages_at_once(generator, tokenizer) -> None:
    abort, ids = threading.Event(), tokenizer.encode(PROMPT)
    generator.begin_stream(ids, GREEDY, False, None, None, None, abort)

    first = [generator.stream() for _ in range(3)]
    abort.set()
    last = generator.stream()
    native = generator.cache.generator()

    assert not any(eos for _, eos, _ in first)
    assert last[:2] == ("", True)
    assert native.free_pages == native.pages


@pytest.mark.parametrize("is_pair", [False, True])
def test_embeddings_take_the_place_of_ids(generator, model, tokenizer, is_pair) -> None:
    before, ids, after = map(tokenizer.encode, ("A:", "quick brown fox", "Yes"))
    other = tokenizer.encode("A tokenizer of a tiny model")[:, : ids.shape[1]]
    inserted = torch.arange(FIRST_EMBEDDING, FIRST_EMBEDDING + ids.shape[1])[None]
    settings = Settings.greedy(cfg_scale=1.7) if is_pair else GREEDY
    rows = torch.cat([ids, other]) if is_pair else ids

    def text(middle: torch.Tensor, **options: object) -> str:
        parts = [part.expand(len(rows), -1) for part in (before, middle, after)]
        found = streamed(generator, torch.cat(parts, 1), settings, most=8, **options)
        return "".join(r["chunk"] for r in found)

    embedded = text(inserted, input_embeddings=model.native.decoder.embed(rows))
    shown = generator.sequence_ids

    assert embedded == text(rows)
    assert not (shown >= FIRST_EMBEDDING).any()


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


def test_legacy_streams_return_logits_of_tokens_without_a_batch(generator, tokenizer) -> None:
    options = {"return_probabilities": True, "return_logits": True}
    generator.begin_stream_ex(tokenizer.encode(PROMPT), GREEDY, **options)

    found = [generator.stream() for _ in range(4)]

    for _, _, ids, probs, logits in found:
        assert probs.shape == ids.shape == (1, len(logits))
        assert logits.shape[1:] == (301,)
    logits = torch.cat([row[-1] for row in found])
    assert logits.argmax(1).tolist() == torch.cat([row[2] for row in found], 1)[0].tolist()
