"""Stops of a request end a filtered text where EOS may, and nowhere else."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from constrained import ids_of, same
from hypothesis import given
from hypothesis import strategies as st

from exl2flow.core.errors import FilterDeadEnd
from exl2flow.core.requests.request import Filter
from exl2flow.engine.filters import (
    Combined,
    ForeignFilter,
    GrammarFilter,
    PrefixFilter,
    SelectFilter,
)
from exl2flow.model import Tokenizer

END, CALL = "<|im_end|>", "<|call|>"
DEMO = Path(__file__).parents[4] / "demo" / "model"
WIDTH = 4128


def with_specials() -> Tokenizer:
    one = Tokenizer.load(DEMO)
    one.backend.add_special_tokens([END, CALL])
    return Tokenizer(one.backend, bos_token_id=None, eos_token_ids=one.eos_token_ids)


TOKENIZER = with_specials()
(EOS,) = TOKENIZER.eos_token_ids


def id_of(text: str) -> int:
    found = TOKENIZER.single_id(text)
    assert found is not None
    return found


class UpToThree:
    """A filter for exllamav2: `a` up to three times, and EOS behind the first."""

    def begin(self, prefix_str: str) -> None:
        self.count = 0

    def feed(self, token: object) -> None:
        self.count += 1

    def next(self) -> Any:
        ends = {EOS} if self.count else set[int]()
        return ({id_of("a")} if self.count < 3 else set[int]()) | ends, ends


FILTERS: dict[str, Callable[[], Filter]] = {
    "choice": lambda: SelectFilter(["a", "ab", "aba"]),
    "prefix": lambda: PrefixFilter("ab"),
    "schema": lambda: GrammarFilter(
        json_schema={
            "type": "object",
            "properties": {"a": {"enum": [1, 11]}},
            "required": ["a"],
            "additionalProperties": False,
        }
    ),
    "regex": lambda: GrammarFilter(regex=r"(a|b){2,}1?"),
    "lark": lambda: GrammarFilter(lark=r'start: /(.|\n)*/ ("{" /1/ "}")?'),
    "foreign": lambda: ForeignFilter(UpToThree),
}


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("kind", FILTERS)
def test_stop_is_allowed_exactly_where_eos_is(kind: str, as_text: bool) -> None:
    ended = 0
    for seed in range(12):
        rng, stops = Random(seed), [END, "\n"]
        ids = {*map(id_of, stops)}
        state = Combined(
            [FILTERS[kind]()], TOKENIZER, WIDTH, stops=stops if as_text else sorted(ids)
        )
        for _ in range(12):
            allowed = state.allowed()
            if allowed.words is None:
                break
            choices = {*ids_of(allowed.words, TOKENIZER.vocab_size)}
            assert (choices >= ids) == (EOS in choices)
            assert EOS in choices or not choices & ids
            assert (allowed.ends >= ids) == (EOS in allowed.ends) == (EOS in choices)
            ended += EOS in choices
            if allowed.must_end or not (others := sorted(choices - ids - {EOS})):
                break
            state.accept(rng.choice(others))

    assert ended or kind == "prefix"


def test_free_text_of_a_grammar_may_end_with_a_stop() -> None:
    for text in (GrammarFilter(regex=r"(?s).*"), GrammarFilter(lark=r"start: /(.|\n)*/")):
        state = Combined([text], TOKENIZER, WIDTH, stops=[id_of(END)])
        assert id_of(END) in ids_of(state.allowed().words, WIDTH)
        state.accept(id_of("b"))

        allowed = state.allowed()

        assert id_of(END) in ids_of(allowed.words, WIDTH)
        assert allowed.ends == {EOS, id_of(END)}


def test_special_token_that_a_grammar_names_stays_allowed() -> None:
    grammar = GrammarFilter(lark=f"start: /a+/ {CALL}")
    state = Combined([grammar], TOKENIZER, WIDTH, stops=[CALL, END])

    state.accept(id_of("a"))
    assert {*ids_of(state.allowed().words, WIDTH)} == {id_of("a"), id_of(CALL)}

    only = Combined([GrammarFilter(lark=f'start: "a" {CALL}')], TOKENIZER, WIDTH, stops=[CALL])
    only.accept(id_of("a"))
    assert ids_of(only.allowed().words, WIDTH) == [id_of(CALL)]
    assert not only.allowed().must_end


def test_text_of_which_only_stops_are_left_must_end() -> None:
    state = Combined([GrammarFilter(regex="a+")], TOKENIZER, WIDTH, stops=[END])
    state.accept(id_of("a"))

    assert not state.allowed(blocked=[EOS]).must_end
    assert state.allowed(blocked=[EOS, id_of("a")]).must_end


def test_stop_that_a_text_needs_is_a_dead_end() -> None:
    state = Combined([GrammarFilter(regex="a1b")], TOKENIZER, WIDTH, stops=["1"])
    state.accept(id_of("a"))

    with pytest.raises(FilterDeadEnd, match="and the stops after 'a'"):
        state.allowed()


def test_healed_token_is_no_stop() -> None:
    grammar = GrammarFilter(regex="a+")
    state = Combined([grammar], TOKENIZER, WIDTH, prefix="\n", stops=["\n"])

    assert id_of("\n") in ids_of(state.allowed().words, WIDTH)
    state.accept(id_of("\n"))
    assert id_of("\n") not in ids_of(state.allowed().words, WIDTH)
    state.accept(id_of("a"))
    assert id_of("\n") in ids_of(state.allowed().words, WIDTH)


def test_stops_may_change_within_a_text() -> None:
    state = Combined([GrammarFilter(regex="a+")], TOKENIZER, WIDTH, stops=[END])
    state.accept(id_of("a"))

    state.follow([CALL])

    assert {*ids_of(state.allowed().words, WIDTH)} == {EOS, id_of("a"), id_of(CALL)}
    state.follow(None)
    assert {*ids_of(state.allowed().words, WIDTH)} == {EOS, id_of("a")}


@pytest.mark.parametrize("stops", [None, [], [EOS], ["a1"], [WIDTH + 5]])
@pytest.mark.parametrize("kind", FILTERS)
def test_other_stops_change_nothing(kind: str, stops: list[int | str] | None) -> None:
    for seed in range(4):
        rng = Random(seed)
        filters = [FILTERS[kind]()]
        state = Combined(filters, TOKENIZER, WIDTH, stops=stops)
        before = Combined(filters, TOKENIZER, WIDTH)
        for _ in range(8):
            words, other = state.allowed().words, before.allowed().words
            assert ids_of(words, WIDTH) == ids_of(other, WIDTH)
            choices = {*ids_of(words, TOKENIZER.vocab_size)} - {EOS}
            if not choices or state.allowed().must_end:
                break
            token = rng.choice(sorted(choices))
            state.accept(token)
            before.accept(token)


@given(st.sampled_from(["choice", "regex", "schema"]), st.integers(0, 99))
def test_text_that_is_cut_back_has_the_same_stops(kind: str, seed: int) -> None:
    rng, kept, one = Random(seed), list[int](), FILTERS[kind]()
    state = Combined([one], TOKENIZER, WIDTH, stops=[END, "\n"])
    for _ in range(10):
        choices = {*ids_of(state.allowed().words, WIDTH)} - {EOS, id_of(END), id_of("\n")}
        if choices and rng.random() < 0.7:
            kept.append(rng.choice(sorted(choices)))
            state.accept(kept[-1])
        elif kept:
            count = rng.randint(1, len(kept))
            state.rollback(count)
            del kept[-count:]
        fresh = Combined([one], TOKENIZER, WIDTH, stops=[END, "\n"])
        for token in kept:
            fresh.accept(token)
        assert same(state, fresh)
