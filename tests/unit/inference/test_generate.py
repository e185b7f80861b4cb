"""The base generator on a tiny model: cache, draws and stop conditions."""

import json
from pathlib import Path

import pytest
import torch
from tiny import VOCAB_SIZE, make_tiny

from exl2flow.core.errors import ContextOverflow, InferenceError, SourceModelError
from exl2flow.inference import BaseGenerator, LoadedModel, SamplingSettings, load_model

PROMPT = "The quick brown fox"
GREEDY = SamplingSettings.greedy()
HOT = SamplingSettings(temperature=2.0, top_k=0, top_p=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder, device="cpu")


@pytest.fixture(scope="module")
def generator(model: LoadedModel) -> BaseGenerator:
    return BaseGenerator(model)


@torch.inference_mode()
def likeliest(model: LoadedModel, count: int) -> list[int]:
    """Return greedy tokens computed without a cache."""
    ids = model.tokenizer.encode(PROMPT, add_bos=True)
    start = len(ids)
    for _ in range(count):
        logits = model.decoder.forward(torch.tensor([ids]))[0, -1]
        ids.append(int(logits.argmax()))
    return ids[start:]


def test_greedy_text_is_that_of_full_passes(model: LoadedModel, generator: BaseGenerator) -> None:
    made = generator.generate(PROMPT, max_new_tokens=20, settings=GREEDY, stop_tokens=())

    assert list(made.ids) == likeliest(model, 20)
    assert made.reason == "max_new_tokens"
    assert made.prompt == PROMPT


def test_text_continues_the_prompt(model: LoadedModel, generator: BaseGenerator) -> None:
    made = generator.generate(PROMPT, max_new_tokens=20, settings=GREEDY, stop_tokens=())

    ids = [*model.tokenizer.encode(PROMPT, add_bos=True), *made.ids]
    assert made.prompt + made.text == model.tokenizer.decode(ids)


def test_text_is_shown_in_pieces_as_it_is_generated(generator: BaseGenerator) -> None:
    pieces: list[str] = []

    made = generator.generate(
        PROMPT, max_new_tokens=20, settings=GREEDY, stop_tokens=(), show=pieces.append
    )

    assert "".join(pieces) == made.text
    assert len([piece for piece in pieces if piece]) > 1


def test_equal_seeds_give_equal_tokens_and_others_do_not(generator: BaseGenerator) -> None:
    made = [
        generator.generate(PROMPT, max_new_tokens=16, settings=HOT, seed=seed, stop_tokens=()).ids
        for seed in (1, 1, 2)
    ]

    assert made[0] == made[1] != made[2]


def test_without_a_seed_draws_differ(generator: BaseGenerator) -> None:
    made = {
        generator.generate(PROMPT, max_new_tokens=16, settings=HOT, stop_tokens=()).ids
        for _ in range(2)
    }

    assert len(made) == 2


def test_stop_token_ends_the_text_and_is_not_part_of_it(
    model: LoadedModel, generator: BaseGenerator
) -> None:
    tokens = likeliest(model, 8)
    stop = tokens[5]
    expected = tokens[: tokens.index(stop)]

    made = generator.generate(PROMPT, max_new_tokens=8, settings=GREEDY, stop_tokens=[stop])

    assert list(made.ids) == expected
    assert made.reason == "stop_token"


def test_end_of_sequence_tokens_of_the_model_are_the_default_stops(
    folder: Path, model: LoadedModel, tmp_path: Path
) -> None:
    tokens = likeliest(model, 8)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": [1, tokens[3]]}))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(folder / name)

    made = BaseGenerator(load_model(tmp_path, device="cpu")).generate(
        PROMPT, max_new_tokens=8, settings=GREEDY
    )

    assert list(made.ids) == tokens[: tokens.index(tokens[3])]
    assert made.reason == "stop_token"


def test_stream_yields_tokens_one_by_one(model: LoadedModel, generator: BaseGenerator) -> None:
    ids = model.tokenizer.encode(PROMPT, add_bos=True)

    stream = generator.stream(ids, max_new_tokens=6, settings=GREEDY)

    assert next(stream) == likeliest(model, 1)[0]
    assert list(stream) == likeliest(model, 6)[1:]


def test_first_token_of_the_sequence_is_bos_unless_unwanted(
    model: LoadedModel, generator: BaseGenerator
) -> None:
    with_bos, without = (
        generator.generate(
            PROMPT, max_new_tokens=12, settings=GREEDY, add_bos=add_bos, stop_tokens=()
        )
        for add_bos in (True, False)
    )

    assert model.tokenizer.encode(PROMPT, add_bos=True)[0] == model.spec.bos_token_id
    assert with_bos.ids != without.ids


def test_no_new_tokens_give_no_text(generator: BaseGenerator) -> None:
    made = generator.generate(PROMPT, max_new_tokens=0)

    assert (made.ids, made.text, made.reason) == ((), "", "max_new_tokens")


def test_all_positions_can_be_used_and_not_one_more(
    model: LoadedModel, generator: BaseGenerator
) -> None:
    ids = [2] * 250
    room = model.spec.max_positions - len(ids)

    assert len(list(generator.stream(ids, max_new_tokens=room, settings=GREEDY))) == room
    with pytest.raises(ContextOverflow, match="250 prompt tokens and 7 new ones exceed"):
        next(generator.stream(ids, max_new_tokens=room + 1, settings=GREEDY))


def test_tokens_outside_the_vocabulary_are_refused(generator: BaseGenerator) -> None:
    for token in (VOCAB_SIZE, -1):
        with pytest.raises(SourceModelError, match="not in the vocabulary of"):
            next(generator.stream([5, token], max_new_tokens=1, settings=GREEDY))


def test_empty_prompt_is_refused(generator: BaseGenerator) -> None:
    with pytest.raises(InferenceError, match="the prompt has no tokens"):
        generator.generate("", max_new_tokens=3, add_bos=False)


def test_model_read_from_disk_in_every_pass_generates_the_same(
    folder: Path, generator: BaseGenerator
) -> None:
    streamed = BaseGenerator(load_model(folder, device="cpu", streamed=True))

    made = [
        each.generate(PROMPT, max_new_tokens=8, settings=HOT, seed=3, stop_tokens=()).ids
        for each in (generator, streamed)
    ]

    assert made[0] == made[1]


def test_no_token_is_asked_for(model: LoadedModel) -> None:
    made = BaseGenerator(model, cache="q8").stream(
        [1, 2], max_new_tokens=0, settings=SamplingSettings.greedy()
    )

    assert list(made) == []
