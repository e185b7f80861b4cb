"""Encoding in several threads: long texts, and special tokens read or not."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TEXT, tiny_tokenizer
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from exl2flow.core.errors import ContextOverflow, SourceModelError
from exl2flow.model import Tokenizer
from exl2flow.model.text import tokenizer as module
from exl2flow.model.text.tokenizer import LONG_TEXT

DEMO = Path(__file__).parents[4] / "demo" / "model"
ADDED = (
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken(" left", lstrip=True, special=True),
    AddedToken("Right ", rstrip=True),
)
PARTS = [*TEXT, "<s>", "</s>", *(token.content for token in ADDED), "swordword", "ß🙂", "\n", " "]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer())
    backend.add_tokens(list(ADDED))
    return backend


def unigram() -> tokenizers.Tokenizer:
    """Return a tokenizer with a normalizer that other added tokens see, and without bytes."""
    letters = sorted({*"".join(TEXT).lower()})
    pieces = [("<unk>", 0.0), ("<s>", -9.0), *((letter, -3.0) for letter in letters), ("the", -2.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Punctuation()
    backend.add_tokens([AddedToken("<s>", special=True, normalized=False), *ADDED])
    return backend


TOKENIZERS = {
    "byte-level": Tokenizer(byte_level(), bos_token_id=0, eos_token_ids=[1]),
    "unigram": Tokenizer(unigram(), bos_token_id=1, eos_token_ids=[]),
    "demo": Tokenizer.load(DEMO),
}
SINGLE = {
    name: tokenizers.Tokenizer.from_str(ours.backend.to_str()) for name, ours in TOKENIZERS.items()
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS) | st.text(max_size=9), max_size=20), special=...)
def test_ids_are_those_of_one_backend_whose_option_changes_for_long_texts_too(
    name: str, parts: list[str], special: bool
) -> None:
    tokenizer, one, text = TOKENIZERS[name], SINGLE[name], "".join(parts)
    one.encode_special_tokens = not special
    expected = one.encode(text, add_special_tokens=False).ids

    assert tokenizer.encode(text, special=special) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LONG_TEXT", 0)
        assert tokenizer.encode(text, special=special) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_second_backend_is_a_copy(name: str) -> None:
    tokenizer = TOKENIZERS[name]

    assert tokenizer._plain.to_str() == tokenizer.backend.to_str()
    assert tokenizer._plain.get_vocab() == tokenizer.backend.get_vocab()


def test_threads_that_read_special_tokens_and_others_do_not_disturb_each_other() -> None:
    tokenizer = Tokenizer(byte_level(), bos_token_id=0, eos_token_ids=[1])
    texts = [("<s>" + TEXT[i % len(TEXT)]) * (1 + 200 * (i % 3 == 0)) for i in range(12)]
    cases = [(text, special) for text in texts for special in (True, False)] * 4
    expected = [tokenizer.encode(text, special=special) for text, special in cases]
    fresh = Tokenizer(byte_level(), bos_token_id=0, eos_token_ids=[1])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: fresh.encode(case[0], special=case[1]), cases))

    assert found == expected
    assert any(len(text) > LONG_TEXT for text in texts)


@pytest.mark.parametrize("special", [True, False])
def test_a_text_of_too_many_tokens_is_refused_before_they_are_listed(special: bool) -> None:
    tokenizer = Tokenizer(byte_level(), bos_token_id=0, eos_token_ids=[1])
    text = TEXT[0] * (1 + LONG_TEXT // len(TEXT[0]))
    count = len(tokenizer.encode(text, special=special))

    tokenizer.most = count
    assert len(tokenizer.encode(text, special=special)) == count
    tokenizer.most = count - 1
    with pytest.raises(ContextOverflow, match=f"has {count} tokens; it may have {count - 1}"):
        tokenizer.encode(text, special=special)


@pytest.mark.parametrize("special", [True, False])
def test_other_threads_run_while_a_long_text_is_encoded(special: bool) -> None:
    tokenizer, text, ticks, stop = TOKENIZERS["demo"], " ".join(TEXT * 1500), [0], threading.Event()
    tokenizer.encode("", special=special)  # which makes the second backend

    def tick() -> None:
        while not stop.is_set():
            time.sleep(0.0005)
            ticks[0] += 1

    def ticks_meanwhile() -> int:
        before = ticks[0]
        tokenizer.encode(text, special=special)
        return ticks[0] - before

    thread = threading.Thread(target=tick)
    thread.start()
    try:  # with the GIL held: one or two, however often it is tried
        assert any(ticks_meanwhile() > 8 for _ in range(8))
    finally:
        stop.set()
        thread.join()


def test_a_panic_in_a_long_text_is_an_error_of_ours() -> None:
    backend = byte_level()
    backend.normalizer = normalizers.Replace("", "aa")
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=[])

    for special in (True, False):
        with pytest.raises(SourceModelError, match=r"`tokenizers` fails on .*fetch it again"):
            tokenizer.encode("three words here" * LONG_TEXT, special=special)
