import pytest
from constrained import ids_of, text_of, walk
from spelled import EOS, spelled

from exl2flow.core.errors import FilterDeadEnd
from exl2flow.engine.filters import Combined, GrammarFilter, PrefixFilter, SelectFilter
from exl2flow.model import Tokenizer

WIDTH = 4128


def test_all_filters_must_allow_a_token(demo: Tokenizer) -> None:
    filters = [SelectFilter(["red", "green", "reddish", "blue"]), PrefixFilter("re", "bl")]
    texts = set()
    for seed in range(60):
        ids = walk(Combined(filters, demo, WIDTH), demo, seed=seed)
        assert ids is not None
        texts.add(text_of(demo, ids))

    assert texts == {"red", "reddish", "blue"}


def test_prefix_and_grammar_hold_together(demo: Tokenizer) -> None:
    filters = [GrammarFilter(regex="[a-f]{2,6}!"), PrefixFilter("bad", "fee")]
    for seed in range(40):
        ids = walk(Combined(filters, demo, WIDTH), demo, seed=seed)
        assert ids is not None
        text = text_of(demo, ids)
        assert text.startswith(("bad", "fee"))
        assert text.endswith("!")


def test_nothing_left_to_all_filters_is_a_dead_end(demo: Tokenizer) -> None:
    state = Combined([SelectFilter(["ab"]), PrefixFilter("ac")], demo, WIDTH)
    (first,) = ids_of(state.allowed().words, WIDTH)
    assert demo.pieces[first] == "a"

    state.accept(first)

    with pytest.raises(FilterDeadEnd, match=r"SelectFilter.*'ab'.*PrefixFilter.*'ac'.* after 'a'"):
        state.allowed()
    state.rollback(1)
    assert ids_of(state.allowed().words, WIDTH) == [first]


def test_complete_choice_in_an_unfinished_grammar_is_a_dead_end(demo: Tokenizer) -> None:
    state = Combined([SelectFilter(["a"]), GrammarFilter(regex="a[bc]")], demo, WIDTH)
    state.accept(demo.encode("a")[0])

    with pytest.raises(FilterDeadEnd):
        state.allowed()


def test_bans_leave_the_rest(demo: Tokenizer) -> None:
    state = Combined([SelectFilter(["yes", "no"])], demo, WIDTH)
    choices = ids_of(state.allowed().words, WIDTH)

    assert ids_of(state.allowed(blocked=choices[1:]).words, WIDTH) == choices[:1]
    with pytest.raises(FilterDeadEnd, match=r"SelectFilter.* and the bans after ''"):
        state.allowed(blocked=choices)
    assert ids_of(state.allowed(only=choices[:2], blocked=choices[:1]).words, WIDTH) == [choices[1]]


def test_text_that_may_end_ends_where_all_else_is_banned() -> None:
    tokenizer, ids = spelled(["a", "b"])
    state = Combined([GrammarFilter(regex="a+")], tokenizer, 40)
    state.accept(ids[b"a"])

    assert not state.allowed(blocked=[EOS]).must_end
    assert state.allowed(blocked=[ids[b"a"]]).must_end
    assert state.allowed(blocked=[EOS, ids[b"a"]]).must_end


def test_end_is_taken_early_on_request() -> None:
    tokenizer, ids = spelled(["a", "b"])
    eager = Combined([GrammarFilter(regex="a+")], tokenizer, 40, prefer_end=True)
    patient = Combined([GrammarFilter(regex="a+")], tokenizer, 40)

    for state in (eager, patient):
        assert not state.allowed().must_end
        state.accept(ids[b"a"])

    assert eager.allowed().must_end
    assert not patient.allowed().must_end


def test_early_end_leaves_free_text_alone() -> None:
    tokenizer, ids = spelled(["a", "b"])
    state = Combined([PrefixFilter("a")], tokenizer, 40, prefer_end=True)

    state.accept(ids[b"a"])

    assert (state.allowed().words, state.allowed().must_end) == (None, False)


def test_early_end_takes_the_shorter_choice() -> None:
    tokenizer, ids = spelled(["red", "dish"])
    state = Combined([SelectFilter(["red", "reddish"])], tokenizer, 40, prefer_end=True)

    state.accept(ids[b"red"])

    assert state.allowed().must_end


def test_no_filters_allow_all() -> None:
    tokenizer, ids = spelled(["a", "b"])
    state = Combined([], tokenizer, 40)

    assert state.allowed().words is None
    assert ids_of(state.allowed(blocked=[ids[b"a"]]).words, 3) == [EOS, ids[b"b"]]
