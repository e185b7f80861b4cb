import random

import pytest
from constrained import ids_of, text_of, walk
from spelled import EOS, spelled

from exl2flow.core.errors import ConfigError
from exl2flow.engine.filters import PrefixFilter, SelectFilter
from exl2flow.model import Tokenizer

BYTES = [bytes([byte]) for byte in range(256)]
STRINGS = ("Yes", "Yes, of course", "no", " 7%", "naïve", "你好")


def allowed(tokenizer: Tokenizer, given: PrefixFilter | SelectFilter, *before: int) -> set[int]:
    state = given.start(tokenizer, tokenizer.vocab_size)
    for token in before:
        state.accept(token)
    return set(ids_of(state.allowed().words, tokenizer.vocab_size))


@pytest.mark.parametrize("name", ["demo", "by_sentencepiece"])
def test_selected_text_is_one_of_the_strings(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ends = bool(tokenizer.eos_token_ids)
    seen = set()
    for seed in range(60):
        ids = walk(SelectFilter(STRINGS).start(tokenizer, 4100), tokenizer, seed=seed)
        assert ids is not None
        seen.add(text_of(tokenizer, ids))

    # without an EOS id, the shorter one of two strings ends the text
    assert seen == {*STRINGS} - (set() if ends else {"Yes, of course"})


@pytest.mark.parametrize("name", ["demo", "by_sentencepiece"])
def test_text_begins_with_one_of_the_strings(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    seen = set()
    for seed in range(30):
        state, rng, ids = PrefixFilter(*STRINGS).start(tokenizer, 4096), random.Random(seed), []
        while (words := state.allowed().words) is not None:
            assert not state.allowed().may_end
            ids.append(rng.choice(ids_of(words, tokenizer.vocab_size)))
            state.accept(ids[-1])
        seen |= {s for s in STRINGS if text_of(tokenizer, ids).startswith(s)}
        state.accept(EOS)
        assert state.allowed().words is None

    assert seen >= {*STRINGS} - {"Yes, of course"}


def test_tokens_are_those_on_the_way() -> None:
    tokenizer, ids = spelled(["r", "re", "red", "redo", "e", "d", "ed", "g", "R", "edx"])

    assert allowed(tokenizer, SelectFilter(["red"])) == {ids[b"r"], ids[b"re"], ids[b"red"]}
    assert allowed(tokenizer, SelectFilter(["red"]), ids[b"r"]) == {ids[b"e"], ids[b"ed"]}
    assert allowed(tokenizer, SelectFilter(["red"]), ids[b"g"]) == set()


def test_token_may_be_longer_than_what_a_prefix_lacks() -> None:
    tokenizer, ids = spelled(["r", "re", "red", "redo", "e", "d", "ed", "g", "edx", "er"])
    given = PrefixFilter("red")

    assert allowed(tokenizer, given) == {ids[key] for key in (b"r", b"re", b"red", b"redo")}
    assert allowed(tokenizer, given, ids[b"r"]) == {ids[b"e"], ids[b"ed"], ids[b"edx"]}
    assert allowed(tokenizer, given, ids[b"redo"]) == {*range(tokenizer.vocab_size)}


def test_string_that_begins_with_another_prefix_is_moot() -> None:
    tokenizer, ids = spelled(["story", "time"])
    state = PrefixFilter("storytime", "story").start(tokenizer, 3)

    state.accept(ids[b"story"])

    assert state.allowed().words is None


def test_completing_token_ends_a_selected_text() -> None:
    tokenizer, ids = spelled(["red", "green", "re", "d"])
    state = SelectFilter(["red", "green"]).start(tokenizer, 40)

    assert state.allowed().ends == {ids[b"red"], ids[b"green"]}
    state.accept(ids[b"re"])
    assert state.allowed().ends == {ids[b"d"]}
    state.accept(ids[b"d"])
    assert state.allowed().must_end


def test_model_chooses_between_a_string_and_a_longer_one() -> None:
    tokenizer, ids = spelled(["red", "dish"])
    state = SelectFilter(["reddish", "red"]).start(tokenizer, 40)

    assert state.allowed().ends == set()
    state.accept(ids[b"red"])

    after = state.allowed()
    assert (after.ends, after.may_end, after.must_end) == ({EOS, ids[b"dish"]}, True, False)
    assert ids_of(after.words, 40) == sorted({EOS, ids[b"dish"]})


def test_case_of_each_character_is_free_on_request() -> None:
    tokenizer, ids = spelled([*"rREeDdgG", "Red", "rED", "É", "é", "ß", "SS"])

    folds = SelectFilter(["Red"], case_insensitive=True)
    assert allowed(tokenizer, folds) == {ids[key] for key in (b"r", b"R", b"Red", b"rED")}
    assert allowed(tokenizer, folds, ids[b"R"]) == {ids[b"e"], ids[b"E"]}
    accents = SelectFilter(["É"], case_insensitive=True)
    assert allowed(tokenizer, accents) == {ids["É".encode()], ids["é".encode()]}
    assert allowed(tokenizer, SelectFilter(["red"])) == {ids[b"r"]}


def test_any_spelling_of_case_is_sampled(demo: Tokenizer) -> None:
    given = SelectFilter(["Yes, of course", "no"], case_insensitive=True)
    texts = set()
    for seed in range(100):
        ids = walk(given.start(demo, 4096), demo, seed=seed)
        assert ids is not None
        texts.add(text_of(demo, ids))

    assert {text.lower() for text in texts} == {"yes, of course", "no"}
    assert len(texts) > 10


def test_healed_token_belongs_to_the_text() -> None:
    tokenizer, ids = spelled(["The", "The an", "The answer", " an", " answer", "a", "answer"])
    healed = set(tokenizer.healing(ids[b"The an"]))
    state = SelectFilter(["swer"]).start(tokenizer, 40, "The an")

    first = state.allowed()
    assert healed & set(ids_of(first.words, 40)) == {ids[b"The answer"]}
    assert first.ends == {ids[b"The answer"]}

    state = PrefixFilter("swer").start(tokenizer, 40, "The an")
    state.accept(ids[b"The answer"])
    assert state.allowed().words is None


def test_healed_tokens_keep_their_case(demo: Tokenizer) -> None:
    healed = next(token for token, piece in enumerate(demo.pieces) if piece == " Th")
    only = set(demo.healing(healed))
    texts = set()
    for seed in range(60):
        given = SelectFilter(["e end", "at end"], case_insensitive=True)
        state = given.start(demo, 4096, " Th")
        first = random.Random(seed).choice(
            [token for token in ids_of(state.allowed().words, 4096) if token in only]
        )
        state.accept(first)
        ids = walk(state, demo, seed=seed)
        assert ids is not None
        texts.add(text_of(demo, [first, *ids]))

    assert {text.lower() for text in texts} == {" the end", " that end"}
    assert all(text.startswith(" Th") for text in texts)


def test_characters_are_spelled_by_tokens_of_their_bytes() -> None:
    tokenizer, ids = spelled(["你".encode()[:2], "你".encode()[2:], "x"])
    state = SelectFilter(["你"]).start(tokenizer, 40)

    assert ids_of(state.allowed().words, 40) == [ids["你".encode()[:2]]]
    state.accept(ids["你".encode()[:2]])
    assert state.allowed().ends == {ids["你".encode()[2:]]}


def test_ways_that_no_token_completes_are_closed() -> None:
    tokenizer, ids = spelled(["a", "ab", "bc", "b"])

    assert allowed(tokenizer, SelectFilter(["abc", "azz"])) == {ids[b"a"]}
    with pytest.raises(ConfigError, match=r"cannot spell .*azz"):
        SelectFilter(["azz"]).start(tokenizer, 40)
    with pytest.raises(ConfigError, match="cannot spell"):
        PrefixFilter("abd").start(tokenizer, 40)


@pytest.mark.parametrize("given", [SelectFilter(STRINGS), PrefixFilter(*STRINGS)])
def test_text_that_is_cut_back_continues_like_a_new_one(
    demo: Tokenizer, given: PrefixFilter | SelectFilter
) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        state, kept = given.start(demo, 4096), list[int]()
        for _ in range(30):
            if kept and rng.random() < 0.4:
                count = rng.randint(1, len(kept))
                state.rollback(count)
                del kept[len(kept) - count :]
            choices = ids_of(state.allowed().words, 4096) or [rng.randrange(4096)]
            kept.append(rng.choice([*choices, rng.randrange(4096)]))
            state.accept(kept[-1])
            fresh = given.start(demo, 4096)
            for token in kept:
                fresh.accept(token)
            one, other = state.allowed(), fresh.allowed()
            assert (one.ends, one.may_end, one.must_end) == (
                other.ends,
                other.may_end,
                other.must_end,
            )
            assert ids_of(one.words, 4096) == ids_of(other.words, 4096)


def test_equal_filters_share_their_masks(demo: Tokenizer) -> None:
    one = SelectFilter(["red", "green"]).start(demo, 4096).allowed()
    other = SelectFilter(("red", "green")).start(demo, 4096).allowed()

    assert one is other
    assert SelectFilter(["a"]) != PrefixFilter("a")


@pytest.mark.parametrize("strings", [[], [""], ["a", 3], [None], ["\ud800"]])
def test_other_than_strings_are_refused(strings: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"`SelectFilter` got .*non-empty strings"):
        SelectFilter(strings)
    with pytest.raises(ConfigError, match="`PrefixFilter` got"):
        PrefixFilter(*strings)


def test_one_string_is_a_choice_of_one() -> None:
    assert SelectFilter("red").strings == ("red",)
