"""exllamav2's generators on a GPU: the texts of ours."""

import pytest
import torch
from tiny import make_tiny

from exl2flow.compat.exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
)
from exl2flow.compat.exllamav2.generator import (
    ExLlamaV2DynamicGenerator,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exl2flow.inference import Generator, SamplingSettings

pytestmark = pytest.mark.gpu
PROMPTS = ["The quick brown", "A tokenizer", "Numbers such as 3.14"]
GREEDY = ExLlamaV2Sampler.Settings.greedy()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ExLlamaV2:
    folder = make_tiny(
        "llama", tmp_path_factory.mktemp("model"), head_dim=64, max_position_embeddings=1024
    )
    model = ExLlamaV2(ExLlamaV2Config(str(folder)))
    model.load_autosplit(ExLlamaV2Cache(model, lazy=True))
    return model


@pytest.fixture(scope="module")
def tokenizer(model: ExLlamaV2) -> ExLlamaV2Tokenizer:
    return ExLlamaV2Tokenizer(model.config)


def expected(model: ExLlamaV2, cache: str | None) -> list[str]:
    generator = Generator(model.native, cache=cache, tokens=4096, slots=16)
    return generator.generate(
        PROMPTS, max_new_tokens=30, settings=SamplingSettings.greedy(), add_bos=False, stops=()
    )


@pytest.mark.parametrize("kind", [ExLlamaV2Cache, ExLlamaV2Cache_Q6])
def test_the_dynamic_generator_gives_our_texts(model, tokenizer, kind) -> None:
    generator = ExLlamaV2DynamicGenerator(model, kind(model, max_seq_len=4096), tokenizer)
    generator.warmup()

    texts = generator.generate(PROMPTS, 30, gen_settings=GREEDY, completion_only=True)

    assert texts == expected(model, kind.format)


def test_a_stream_gives_our_text_and_keeps_to_its_bans(model, tokenizer) -> None:
    cache = ExLlamaV2Cache(model, max_seq_len=4096)
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    generator.set_stop_conditions([])
    ids, made = tokenizer.encode(PROMPTS[0]), list[int]()

    generator.begin_stream_ex(ids, GREEDY)
    text = "".join(generator.stream_ex()["chunk"] for _ in range(20))
    banned = generator.sequence_ids[0, ids.shape[1]].item()
    generator.begin_stream_ex(ids, GREEDY)
    for _ in range(20):
        made += generator.stream_ex(ban_tokens=[banned])["chunk_token_ids"][0].tolist()

    assert text
    assert expected(model, None)[0].startswith(text)
    assert banned not in made
    assert torch.equal(generator.sequence_ids[:, : ids.shape[1]], ids)


def test_bans_and_settings_that_change_apply_to_their_call(model, tokenizer) -> None:
    generator = ExLlamaV2StreamingGenerator(
        model, ExLlamaV2Cache(model, max_seq_len=4096), tokenizer
    )
    generator.set_stop_conditions([])
    ids, settings = tokenizer.encode(PROMPTS[0]), GREEDY.clone()

    def made(bans: dict[int, list[int]]) -> list[int]:
        generator.begin_stream_ex(ids, settings)
        for call in range(8):
            generator.stream_ex(ban_tokens=bans.get(call))
        return generator.sequence_ids[0, ids.shape[1] :].tolist()

    only = {token: [i for i in range(299) if i != token] for token in (40, 41)}
    free = made({})
    once = made({3: [free[3]]})
    several = made({0: only[40], 3: only[41], 4: only[40], 6: only[41]})
    again = made({})
    generator.stream_ex()
    settings.allow_tokens(tokenizer, [42])
    generator.stream_ex()

    assert len(free) == 8
    assert again == free
    assert once[:3] == free[:3]
    assert once[3] != free[3]
    assert [several[call] for call in (0, 3, 4, 6)] == [40, 41, 40, 41]
    assert not {40, 41} & {several[call] for call in (1, 2, 5, 7)}
    assert generator.sequence_ids[0, -1] == 42


def test_a_loop_of_ones_own_has_the_logits_of_a_whole_pass(model, tokenizer) -> None:
    cache, ids = ExLlamaV2Cache_Q6(model, max_seq_len=512), tokenizer.encode(PROMPTS[0] * 20)
    exact = ExLlamaV2Cache(model, max_seq_len=512)
    whole, cut = model.forward(ids), ids.shape[1] - 3

    for each, atol in ((exact, 0.05), (cache, 0.5)):  # of fp16, and of rounded keys and values
        model.forward(ids[:, :cut], each, preprocess_only=True)
        rest = [model.forward(ids[:, i : i + 1], each) for i in range(cut, ids.shape[1])]
        torch.testing.assert_close(torch.cat(rest, 1), whole[:, cut:], atol=atol, rtol=0.05)

    settings = ExLlamaV2Sampler.Settings(token_repetition_penalty=1.1)
    there, here = (
        ExLlamaV2Sampler.sample(logits, settings, ids, 0.7, tokenizer, return_top_tokens=4)
        for logits in (whole[:, -1:], whole[:, -1:].cpu())
    )
    assert torch.equal(there[0], here[0])
    assert torch.equal(there[1], here[1])
