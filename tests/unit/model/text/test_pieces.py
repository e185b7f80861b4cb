import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from spelled import EOS, spelled
from tiny import TEXT, TOKENIZER_SIZE, tiny_tokenizer

from exl2flow.model import Tokenizer


def name(tokenizer: Tokenizer, token_id: int) -> str:
    found = tokenizer.backend.id_to_token(token_id)
    assert found is not None
    return found


@pytest.mark.parametrize("text", TEXT)
def test_pieces_join_to_the_decoded_text(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)

    assert "".join(tokenizer.pieces[token_id] for token_id in ids).lstrip() == text


def test_pieces_keep_the_space_that_begins_a_word(tokenizer: Tokenizer) -> None:
    first, *others = (tokenizer.pieces[token_id] for token_id in tokenizer.encode("a fox"))

    assert not first.endswith(" ")
    assert others[0].startswith(" ")


def test_every_id_has_a_piece(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.pieces) == tokenizer.vocab_size
    assert all(tokenizer.pieces[token_id] == "" for token_id in tokenizer.special_ids)
    assert {tokenizer.pieces[token_id] for token_id in tokenizer.encode("🙂")} >= {"\ufffd"}


def test_healing_lists_the_ids_whose_pieces_begin_with_the_token(tokenizer: Tokenizer) -> None:
    for token_id, piece in enumerate(tokenizer.pieces):
        healing = tokenizer.healing(token_id)

        if piece and "\ufffd" not in piece:
            assert healing == tuple(
                other for other, text in enumerate(tokenizer.pieces) if text.startswith(piece)
            )
        else:
            assert healing == (token_id,)
        assert token_id in healing


def test_healing_finds_pieces_beyond_all_other_characters() -> None:
    tokenizer, ids = spelled(["a", "a\U0010ffff", "a\U0010ffffb", "b"])

    assert tokenizer.healing(ids[b"a"]) == (1, 2, 3)
    assert tokenizer.healing(EOS) == (EOS,)
    assert tokenizer.healing(1_000) == (1_000,)


def test_single_id_is_found_by_text(tokenizer: Tokenizer) -> None:
    for token_id, piece in enumerate(tokenizer.pieces):
        if piece and "\ufffd" not in piece:
            found = tokenizer.single_id(piece)
            assert found is not None
            assert tokenizer.pieces[found] == piece
            assert found == token_id or name(tokenizer, token_id).startswith("<0x")
    assert tokenizer.single_id("no single token") is None
    assert tokenizer.single_id("") is None


def test_single_id_finds_special_tokens_by_name(tokenizer: Tokenizer) -> None:
    for token_id in tokenizer.special_ids:
        assert tokenizer.single_id(name(tokenizer, token_id)) == token_id


def test_pieces_are_found_by_many_threads(tokenizer: Tokenizer) -> None:
    with ThreadPoolExecutor(8) as pool:
        lists = list(pool.map(lambda _: tokenizer.healing(5), range(32)))

    assert lists == [tokenizer.healing(5)] * 32


def test_pieces_of_a_large_vocabulary_take_little_time() -> None:
    content = json.loads(tiny_tokenizer())
    content["model"]["vocab"] |= {f"Ġx{index}": TOKENIZER_SIZE + index for index in range(152_000)}
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer = Tokenizer(backend, bos_token_id=0, eos_token_ids=[1])

    begun = time.process_time()
    healing = tokenizer.healing(TOKENIZER_SIZE + 1)

    assert len(healing) == 1 + 10 + 100 + 1_000 + 10_000 + 52_000
    assert time.process_time() - begun < 3  # 0.4 s; the machine may be busy
