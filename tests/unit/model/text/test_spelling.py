from pathlib import Path

from spelled import sentencepiece_tokenizer, spelled

from exl2flow.model.text.spelling import Spelling, folded

BYTES = [bytes([byte]) for byte in range(256)]


def test_bytes_of_all_tokens_are_known() -> None:
    keys = [*BYTES, "你".encode()[:2], "好 x".encode(), " the"]
    tokenizer, ids = spelled(keys)
    spelling = Spelling(tokenizer)

    assert {key: spelling.of[token] for key, token in ids.items()} == {key: key for key in ids}
    assert spelling.alone == set(range(256))


def test_bytes_of_sentencepiece_are_known(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path)
    spelling = Spelling(tokenizer)

    for text in ("the café 你好 🙂", " two  spaces"):
        ids = tokenizer.encode(text)
        assert b"".join(spelling.of[token] for token in ids).decode() == " " + text


def test_tokens_are_found_by_the_beginning_of_a_text() -> None:
    tokenizer, ids = spelled(["a", "ab", "abc", "abd", "b"])
    spelling = Spelling(tokenizer)

    assert spelling.tokens(b"abx") == [(1, [ids[b"a"]]), (2, [ids[b"ab"]])]
    assert spelling.tokens(b"zz") == []
    (one, two) = spelling.tokens(b"ab", overshoots=True)
    assert one == (1, [ids[b"a"]])
    assert (two[0], set(two[1])) == (2, {ids[b"ab"], ids[b"abc"], ids[b"abd"]})


def test_places_list_positions_from_which_tokens_spell_the_rest() -> None:
    tokenizer, _ = spelled(["a", "ab", "bc", "cd"])
    spelling = Spelling(tokenizer)

    assert spelling.places(b"abcd") == {0, 2, 4}
    assert spelling.places(b"abc") == {0, 1, 3}
    assert spelling.places(b"abc", overshoots=True) == {0, 1, 2, 3}


def test_case_of_whole_characters_is_folded() -> None:
    broken = "É".encode()[:1]

    assert folded("ÉaB".encode()) == "éab".encode()
    assert folded("ΑΣ".encode()) == folded("Α".encode()) + folded("Σ".encode())
    assert folded(b"A" + broken) == b"a" + broken
    tokenizer, ids = spelled(["Ab", "aB", "c"])
    assert dict(Spelling(tokenizer, folds=True).tokens(b"ab"))[2] == [ids[b"Ab"], ids[b"aB"]]
