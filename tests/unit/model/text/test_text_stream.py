import pytest

from exl2flow.model import TextStream, Tokenizer

TEXTS = ("The quick brown fox.", "你好, 🙂👩‍👩‍👧 and naïve", "  spaces\n\tand lines\n")


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_decoded_text(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)

    pieces = [stream.push(token_id) for token_id in ids]

    assert "".join(pieces) + stream.flush() == text


@pytest.mark.parametrize("prompt", range(12))
def test_text_continues_the_prompt(prompt: int, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("A tokenizer needs no more than a few sentences")
    stream = TextStream(tokenizer, ids[:prompt])

    pieces = "".join(map(stream.push, ids[prompt:]))

    assert tokenizer.decode(ids[:prompt]) + pieces == tokenizer.decode(ids)


def test_incomplete_characters_are_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂")
    stream = TextStream(tokenizer)

    pieces = [stream.push(token_id) for token_id in ids]

    assert pieces[-1].endswith("🙂")
    assert not any("\ufffd" in piece for piece in pieces)


def test_flush_shows_incomplete_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂")
    stream = TextStream(tokenizer)

    pieces = [stream.push(token_id) for token_id in ids[:-1]]

    assert not any(pieces)
    assert set(stream.flush()) == {"\ufffd"}
    assert stream.flush() == ""


def test_many_replacement_characters_are_not_held_forever(tokenizer: Tokenizer) -> None:
    (lone,) = {tokenizer.encode("é")[-1]} - set(tokenizer.encode("e"))
    stream = TextStream(tokenizer)

    pieces = [stream.push(lone) for _ in range(20)]

    assert "".join(pieces).count("\ufffd") >= 15
    assert all(len(piece) <= 5 for piece in pieces)


def test_several_characters_of_bytes_are_no_reason_to_give_up(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂🙃🙂")
    stream = TextStream(tokenizer)

    pieces = [stream.push(token_id) for token_id in ids]

    assert "".join(pieces).strip() == "🙂🙃🙂"
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("cut", range(1, 13))
def test_prompt_of_many_bytes_does_not_spoil_the_text(cut: int, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("你好, 🙂👩‍👩‍👧")
    prompt = ids[: ids.index(tokenizer.encode("🙂")[-1]) + 1]
    stream = TextStream(tokenizer, prompt[-cut:])

    pieces = [stream.push(token_id) for token_id in ids[len(prompt) :]]

    assert "".join(pieces) + stream.flush() == "👩‍👩‍👧"


def test_space_after_a_special_token_is_kept(tokenizer: Tokenizer) -> None:
    words, special = tokenizer.encode("fox jumps"), min(tokenizer.special_ids)
    stream = TextStream(tokenizer, [*words[:-2], special])
    middle = [*words[-2:-1], special, special, words[-1]]

    text = "".join(map(stream.push, middle))

    assert tokenizer.decode(words[:-2]) + text == "fox jumps"


def test_special_tokens_are_spelled_on_request(tokenizer: Tokenizer) -> None:
    special = min(tokenizer.special_ids)

    assert TextStream(tokenizer).push(special) == ""
    assert TextStream(tokenizer, special=True).push(special) == tokenizer.decode(
        [special], special=True
    )


def test_stream_returns_to_an_earlier_place(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("naïve 🙂 fox")
    stream = TextStream(tokenizer)
    straight = [stream.push(token_id) for token_id in ids]
    stream = TextStream(tokenizer)

    again = []
    for token_id in ids:
        place = stream.place
        for detour in (*ids[-3:], *ids[:3]):
            stream.push(detour)
        stream.rewind(place)
        again.append(stream.push(token_id))

    assert again == straight
