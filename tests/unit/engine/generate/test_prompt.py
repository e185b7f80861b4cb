import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from spelled import EOS, spelled
from tiny import tiny_tokenizer

from exl2flow.core.errors import CacheFull, ConfigError, ContextOverflow, InferenceError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.request import Request
from exl2flow.engine.generate.prompt import Prompt, check, encoded
from exl2flow.inference import Generator, load_model
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.model import Tokenizer

GUIDED = SamplingSettings(cfg_scale=1.5)
ROOM = {"vocab_size": 300, "context": 2048, "pages": 4, "page_tokens": 256, "slots": 2}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer())
    (tmp_path / "config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}')
    return Tokenizer.load(tmp_path)


def most(request: Request, tokenizer: Tokenizer, **room: Any) -> int:
    return check(request, encoded(request, tokenizer), **(ROOM | room))


def test_text_is_encoded_as_the_request_says(tokenizer: Tokenizer) -> None:
    ids = tuple(tokenizer.encode("a<s>"))

    assert encoded(Request("a<s>"), tokenizer) == Prompt(((0, *ids),))
    assert encoded(Request("a<s>", add_bos=False), tokenizer) == Prompt((ids,))
    assert encoded(Request("a<s>", encode_special=True), tokenizer).sequences[0][-1] == 0


def test_ids_are_taken_as_they_are(tokenizer: Tokenizer) -> None:
    assert encoded(Request([5, 6, 7]), tokenizer) == Prompt(((5, 6, 7),))
    assert encoded(Request(([5, 6], [7]), settings=GUIDED), tokenizer) == Prompt(((5, 6), (7,)))


@pytest.mark.parametrize("prompt", ["", [], ("a", "")])
def test_empty_prompt_is_refused(prompt: Any, tokenizer: Tokenizer) -> None:
    settings = GUIDED if isinstance(prompt, tuple) else SamplingSettings()

    with pytest.raises(InferenceError, match="the prompt has no tokens"):
        encoded(Request(prompt, add_bos=False, settings=settings), tokenizer)


def test_bos_alone_is_a_prompt(tokenizer: Tokenizer) -> None:
    assert encoded(Request(""), tokenizer) == Prompt(((0,),))


def test_healing_takes_off_the_last_token_where_another_can_stand() -> None:
    tokenizer, ids = spelled(["once ", "up", "upon", " z", b"\xc3", b"\xc3\xa9"])
    once, up, z, half = (ids[key] for key in (b"once ", b"up", b" z", b"\xc3"))

    def healed(*prompt: int) -> Prompt:
        return encoded(Request(prompt, heal=True), tokenizer)

    assert healed(once, up) == Prompt(((once,),), healed=up)
    assert healed(up) == Prompt(((up,),))  # nothing would be left
    assert healed(once, z) == Prompt(((once, z),))  # no other token begins with it
    assert healed(once, EOS) == Prompt(((once, EOS),))
    assert healed(once, half) == Prompt(((once, half),))
    assert healed(once, 290) == Prompt(((once, 290),))  # the model has more ids


def test_pair_is_healed_only_if_both_end_in_the_same_token() -> None:
    tokenizer, ids = spelled(["once ", "up", "upon"])
    once, up = ids[b"once "], ids[b"up"]

    def healed(good: tuple[int, ...], bad: tuple[int, ...]) -> Prompt:
        return encoded(Request((good, bad), heal=True, settings=GUIDED), tokenizer)

    assert healed((once, up), (up, up)) == Prompt(((once,), (up,)), healed=up)
    assert healed((once, up), (up, once)).healed is None
    assert healed((once, up), (up,)).healed is None


def test_request_that_fits_may_generate_what_it_asks_for(tokenizer: Tokenizer) -> None:
    assert most(Request([5] * 100, max_new_tokens=30), tokenizer) == 30


def test_without_a_number_as_many_tokens_as_fit(tokenizer: Tokenizer) -> None:
    assert most(Request([5] * 100), tokenizer, context=256) == 156
    assert most(Request([5] * 100), tokenizer, pages=1) == 157  # the last one is never stored
    assert most(Request(([5] * 100, [5] * 300), settings=GUIDED), tokenizer) == 213
    for length in (1, 255, 256, 257):
        prompt = encoded(Request([5] * length), tokenizer)
        fitting = most(Request([5] * length), tokenizer)
        assert prompt.pages(fitting, 256) <= 4 < prompt.pages(fitting + 1, 256)


def test_prompt_beyond_the_context_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        ContextOverflow, match=r"100 prompt tokens and 29 new ones .* 128 positions"
    ):
        most(Request([5] * 100, max_new_tokens=29), tokenizer, context=128)
    with pytest.raises(ContextOverflow, match="128 prompt tokens and 1 new"):
        most(Request([5] * 128), tokenizer, context=128)
    assert most(Request([5] * 100, max_new_tokens=28), tokenizer, context=128) == 28


def test_prompt_beyond_the_cache_is_refused(tokenizer: Tokenizer) -> None:
    assert most(Request([5] * 1024, max_new_tokens=1), tokenizer) == 1
    with pytest.raises(CacheFull, match=r"1024 prompt tokens and 2 new .* 5 pages of 256 .* has 4"):
        most(Request([5] * 1024, max_new_tokens=2), tokenizer)
    with pytest.raises(CacheFull, match="1026 prompt tokens and 1 new ones need 6 pages"):
        most(Request(([5] * 513, [5] * 513), settings=GUIDED), tokenizer)


def test_least_number_has_to_fit(tokenizer: Tokenizer) -> None:
    with pytest.raises(ContextOverflow, match="100 prompt tokens and 200 new"):
        most(Request([5] * 100, min_new_tokens=200), tokenizer, context=256)


@pytest.mark.parametrize("bad", [-1, 300])
def test_unknown_ids_are_refused(bad: int, tokenizer: Tokenizer) -> None:
    with pytest.raises(InferenceError, match=f"id {bad} in the prompt .* vocabulary of 300"):
        most(Request([5, bad, 6]), tokenizer)
    with pytest.raises(InferenceError, match=f"id {bad} in `stops`"):
        most(Request([5], stops=(bad,)), tokenizer)


def test_more_top_tokens_than_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="`top_tokens` is 301, the vocabulary has only 300"):
        most(Request([5], top_tokens=301), tokenizer)


def test_pair_needs_two_slots(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="needs 2 slots; the generator has 1"):
        most(Request(("a", "b"), settings=GUIDED), tokenizer, slots=1)


def test_a_prompt_with_a_placeholder_of_an_image_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"^the prompt holds an image"):
        most(Request([5, 7, 6]), tokenizer, images=[7])

    assert most(Request([5, 6], max_new_tokens=9), tokenizer, images=[7]) == 9


def test_ids_that_stand_for_images_in_the_models_config_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    wrapper = shutil.copytree(folder, tmp_path / "wrapper")
    config = json.loads((folder / "config.json").read_bytes())
    (wrapper / "config.json").write_text(json.dumps(config | {"image_token_id": 7}))
    generator = Generator(load_model(wrapper), tokens=PAGE_TOKENS)

    with pytest.raises(ConfigError, match="the prompt holds an image"):
        generator.submit(Request([5, 7, 6], max_new_tokens=1))
