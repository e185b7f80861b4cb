"""Thoughts are free and end in time; the answer behind them is that of another filter."""

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from constrained import ids_of, same
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.conversation import Thinking
from exl2flow.engine.filters import (
    Allowed,
    Combined,
    GrammarFilter,
    Phases,
    PrefixFilter,
    SelectFilter,
    prepare,
)
from exl2flow.engine.sampling.bits import words_of
from exl2flow.model import Tokenizer
from exl2flow.model.text.thoughts import Splitter

DEMO = Path(__file__).parents[4] / "demo" / "model"
WIDTH = 4128
SPECIAL = Thinking("<think>", "</think>")  # tokens
SPELLED = Thinking("[[thoughts]]", "[[/thoughts]]")  # several tokens each
CHANNELS = Thinking("<|channel|>analysis:", "<|end|><|channel|>final:", "<|channel|>final:")
MARKS = (SPECIAL, SPELLED, CHANNELS)
WORD = GrammarFilter(regex="[a-c]{2,4}!")


def with_marks() -> Tokenizer:
    one = Tokenizer.load(DEMO)
    one.backend.add_special_tokens(["<think>", "</think>", "<|channel|>", "<|end|>", "<|stop|>"])
    return Tokenizer(one.backend, bos_token_id=None, eos_token_ids=one.eos_token_ids)


TOKENIZER = with_marks()
(EOS,) = TOKENIZER.eos_token_ids


def ids_for(text: str) -> list[int]:
    return TOKENIZER.encode(text, special=True)


def fed(text: Phases, *given: str, **options: Any) -> Combined:
    state = Combined([text], TOKENIZER, WIDTH, **options)
    for part in given:
        for token in ids_for(part):
            assert token in ids_of(state.allowed().words, WIDTH), TOKENIZER.pieces[token]
            state.accept(token)
    return state


def forced(state: Combined) -> str:
    """Accept tokens as long as there is one only, and return their text."""
    ids = list[int]()
    while len(choices := ids_of(state.allowed().words, WIDTH)) == 1:
        ids += choices
        state.accept(ids[-1])
    return TOKENIZER.decode(ids, special=True)


def parts_of(text: Phases, ids: list[int]) -> tuple[str, str]:
    """Return thoughts and answer as they are shown."""
    parts = {"thinking": "", "answer": ""}
    splitter = Splitter(text.marks, opened=text.opened)
    for kind, part in splitter.push(TOKENIZER.decode(ids, special=True), ends=True):
        parts[kind] += part
    return parts["thinking"], parts["answer"]


def walk(text: Phases, seed: int, *, most: int = 60) -> list[int] | None:
    """Return allowed ids at random, marks more often than others; None: the text does not end."""
    rng, ids, state = Random(seed), list[int](), Combined([text], TOKENIZER, WIDTH)
    marks = [i for mark in (text.marks.open, text.marks.close) for i in ids_for(mark)]
    for _ in range(most):
        allowed = state.allowed()
        if allowed.must_end:
            return ids
        choices = set(ids_of(allowed.words, TOKENIZER.vocab_size))
        likely = sorted(choices.intersection(marks))
        token = rng.choice(likely if likely and rng.random() < 0.5 else sorted(choices))
        if token == EOS:
            return ids
        state.accept(token)
        ids.append(token)
        if token in allowed.ends:
            return ids
    return None


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("marks", MARKS)
def test_answer_is_that_of_the_inner_filter(marks: Thinking, opened: bool) -> None:
    text = Phases(marks, opened, 12, "So:", WORD)
    thoughtful = 0
    for seed in range(10):
        ids = walk(text, seed)
        assert ids is not None
        thinking, answer = parts_of(text, ids)
        assert re.fullmatch("[a-c]{2,4}!", answer), TOKENIZER.decode(ids, special=True)
        thoughtful += bool(thinking)
    assert thoughtful


@pytest.mark.parametrize("marks", MARKS)
def test_message_and_mark_are_forced_at_the_budget(marks: Thinking) -> None:
    state = fed(Phases(marks, True, 5, "No more time.", WORD))
    for token in ids_for("one")[:1] * 5:
        assert len(ids_of(state.allowed().words, WIDTH)) > 3000
        state.accept(token)

    assert forced(state) == "No more time." + marks.close
    allowed = state.allowed()
    assert {TOKENIZER.pieces[i][0] for i in ids_of(allowed.words, WIDTH)} <= {"a", "b", "c"}
    assert not allowed.may_end


@pytest.mark.parametrize("marks", MARKS)
def test_budget_of_none_closes_at_once(marks: Thinking) -> None:
    opened = fed(Phases(marks, True, 0, "", WORD))
    assert forced(opened) == marks.close

    not_opened = fed(Phases(marks, False, 0, "Enough.", WORD), marks.open)
    assert forced(not_opened) == "Enough." + marks.close


@pytest.mark.parametrize(
    ("marks", "begun"),
    [(m, n) for m in (SPELLED, CHANNELS) for n in range(1, len(ids_for(m.close)))],
)
@pytest.mark.parametrize("before", [0, 2])
def test_mark_that_has_begun_at_the_budget_is_completed(
    marks: Thinking, begun: int, before: int
) -> None:
    closing = ids_for(marks.close)
    state = fed(Phases(marks, True, before + begun, "Late.", WORD))
    for token in [*ids_for("a")[:1] * before, *closing[:begun]]:
        state.accept(token)

    rest = len(TOKENIZER.decode(closing[:begun], special=True))
    assert forced(state) == TOKENIZER.decode(closing, special=True)[rest:]


@pytest.mark.parametrize("marks", [SPELLED, Thinking("[", "]]]")])
def test_mark_in_pieces_closes_thoughts(marks: Thinking) -> None:
    state = fed(Phases(marks, True, None, "", WORD), "so ", *marks.close)

    allowed = ids_of(state.allowed().words, WIDTH)
    assert {TOKENIZER.pieces[i][0] for i in allowed} <= {*"abc"}


def test_closing_mark_may_be_a_stop() -> None:
    state = fed(Phases(SPECIAL, True, 0, "", WORD), stops=["</think>"])

    assert forced(state) == "</think>"


def test_opening_mark_may_have_a_stop() -> None:
    marks = Thinking("<|channel|><think>", "</think>")
    state = fed(Phases(marks, False, None, "", WORD), "<|channel|>", stops=["<think>"])

    assert {*ids_for("<think>")} <= {*ids_of(state.allowed().words, WIDTH)}


@pytest.mark.parametrize("thoughts", ["", "so", "[[a]]"])
def test_what_was_read_as_an_answer_is_forgotten_when_it_was_a_mark(thoughts: str) -> None:
    text = Phases(SPELLED, False, None, "", SelectFilter(["[[a]]", "ab"]))
    state = fed(text, "[[", "thoughts]]", thoughts, "[[/thoughts]]")

    assert {TOKENIZER.pieces[i][0] for i in ids_of(state.allowed().words, WIDTH)} == {*"[a"}
    for part in ("[", "[", "a", "]", "]"):
        state.accept(*ids_for(part))
    assert state.allowed().must_end


def test_thoughts_without_a_budget_go_on() -> None:
    state = fed(Phases(SPECIAL, True, None, "", WORD), "hello " * 100)

    assert {*ids_for("</think>hello")} <= {*ids_of(state.allowed().words, WIDTH)}


def test_text_ends_in_the_answer_only() -> None:
    state = fed(Phases(SPECIAL, True, 50, "", WORD), "well, ", stops=["<|stop|>"])
    ends = {EOS, *ids_for("<|stop|>")}
    assert not ends & {*ids_of(state.allowed().words, WIDTH)}

    for token in ids_for("</think>abc!"):
        assert not state.allowed().may_end
        state.accept(token)

    assert state.allowed().must_end
    letters = fed(Phases(SPECIAL, True, 50, "", GrammarFilter(regex="a+")), stops=["<|stop|>"])
    for token in ids_for("</think>a"):
        letters.accept(token)
    assert ends <= {*ids_of(letters.allowed().words, WIDTH)}
    assert letters.allowed().ends == ends


def test_without_an_inner_filter_all_is_free_but_the_end_of_the_thoughts() -> None:
    state = fed(Phases(SPECIAL, False, 3, "Now."), "<think>")
    for token in ids_for("one")[:1] * 3:
        assert state.allowed().words is None
        state.accept(token)

    assert forced(state) == "Now.</think>"
    assert (state.allowed().words, state.allowed().may_end) == (None, True)


def test_answer_may_come_without_thoughts() -> None:
    state = fed(Phases(SPECIAL, budget=3, then=WORD))
    (mark,) = ids_for("<think>")
    first = {*ids_of(state.allowed().words, WIDTH)}
    assert mark in first
    assert {TOKENIZER.pieces[i][:1] for i in first - {mark}} <= {*"abc<"}

    state.accept(ids_for("a")[0])

    assert mark not in ids_of(state.allowed().words, WIDTH)
    direct = fed(Phases(CHANNELS, False, 3, "", WORD), "<|channel|>final:")
    assert {TOKENIZER.pieces[i][0] for i in ids_of(direct.allowed().words, WIDTH)} <= {*"abc"}


def test_beginning_of_a_mark_may_be_an_answer() -> None:
    text = Phases(SPELLED, False, 3, "", SelectFilter(["[[a]]", "[["]))
    begin, ids = ids_for("[")[0], ids_for("a]]")
    state = Combined([text], TOKENIZER, WIDTH)
    for token in (begin, begin, *ids):
        assert token in ids_of(state.allowed().words, WIDTH)
        state.accept(token)

    assert state.allowed().must_end


def test_white_space_may_come_before_thoughts() -> None:
    state = fed(Phases(SPECIAL, False, 3, "", GrammarFilter(regex=r"\n[a-c]+!")), "\n", "<think>")

    assert len(ids_of(state.allowed().words, WIDTH)) > 3000
    state.rollback(1)
    choices = {*ids_of(state.allowed().words, WIDTH)} - {*ids_for("<think>")}
    assert {TOKENIZER.pieces[i][0] for i in choices} <= {*"abc<"}


@dataclass(frozen=True)
class Strict:
    """A filter of letters `a` that cannot read anything else."""

    def start(self, tokenizer: Tokenizer, width: int, prefix: str = "") -> "Strict":
        return self

    def allowed(self) -> Allowed:
        return Allowed(words_of(ids_for("a")[:1], WIDTH))

    def accept(self, token: int) -> None:
        assert token == ids_for("a")[0]

    def rollback(self, count: int) -> None:
        pass


def test_inner_filter_sees_only_what_it_allows() -> None:
    state = fed(Phases(SPELLED, False, 3, "", Strict()), "[[")
    assert ids_for("a")[0] not in ids_of(state.allowed().words, WIDTH)

    other = fed(Phases(SPELLED, False, 3, "", Strict()), "[[thoughts]]", "so", "[[/thoughts]]")
    assert ids_of(other.allowed().words, WIDTH) == ids_for("a")[:1]

    begun = fed(Phases(Thinking("abc", "]]"), False, 3, "", Strict()), "a", "b")
    assert {TOKENIZER.pieces[i][0] for i in ids_of(begun.allowed().words, WIDTH)} == {"c"}


def test_token_does_not_close_thoughts_and_begin_an_answer() -> None:
    marks = Thinking("[", ".")
    ids = {i for i, piece in enumerate(TOKENIZER.pieces) if re.fullmatch(r"\..*\S.*", piece)}
    assert ids
    state = fed(Phases(marks, True, 9, "", WORD), "so ")

    assert not ids & {*ids_of(state.allowed().words, WIDTH)}


@pytest.mark.parametrize(("thoughts", "is_barred"), [("", False), ("so ", False), ("so ]", True)])
def test_only_a_mark_that_has_begun_bars_what_would_go_beyond_it(
    thoughts: str, is_barred: bool
) -> None:
    ids = {i for i, piece in enumerate(TOKENIZER.pieces) if re.fullmatch(r"\..*\S.*", piece)}
    state = fed(Phases(Thinking("[", "]."), True, 9, "", WORD), thoughts)

    allowed = {*ids_of(state.allowed().words, WIDTH)}

    assert ids & allowed == (set() if is_barred else ids)
    assert {*ids_for("so")} <= allowed


def test_healed_token_comes_before_all_phases() -> None:
    state = Combined([Phases(SPECIAL, True, 0, "", WORD)], TOKENIZER, WIDTH, prefix=" the")
    assert state.allowed().words is None
    state.accept(ids_for(" the")[0])

    assert forced(state) == "</think>"


def test_text_behind_a_healed_token_is_cut_back_to_it() -> None:
    state, fresh = (
        Combined([Phases(SPECIAL, False, 3, "", WORD)], TOKENIZER, WIDTH, prefix=" the")
        for _ in range(2)
    )
    for text in (state, fresh):
        text.accept(*ids_for(" the"))
    for token in (*ids_for("<think>"), *ids_for("so")):
        state.accept(token)

    state.rollback(1 + len(ids_for("so")))

    assert same(state, fresh)
    state.rollback(1)
    assert state.allowed().words is None  # the healed token comes once more


@pytest.mark.parametrize(
    ("marks", "options", "reason"),
    [
        (Thinking("", "b"), {}, "a mark before and behind"),
        (SPECIAL, {"budget": -1}, "`budget` is -1"),
        (SPECIAL, {"budget": 1.5}, "`budget` is 1.5"),
        (SPECIAL, {"message": "a</think>"}, "`message` contains '</think>'"),
    ],
)
def test_wrong_values_are_refused(marks: Thinking, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Phases(marks, **options)


INNER = st.sampled_from([None, WORD, SelectFilter(["[[a", "ab", "<b"]), PrefixFilter("ca")])


@settings(deadline=None, max_examples=40)
@given(
    st.builds(
        Phases,
        st.sampled_from(MARKS),
        st.booleans(),
        st.none() | st.integers(0, 5),
        st.sampled_from(["", "So."]),
        INNER,
    ),
    st.integers(0, 2**32),
)
def test_text_that_is_cut_back_continues_like_a_new_one(text: Phases, seed: int) -> None:
    rng, kept = Random(seed), list[int]()
    state = Combined([text], TOKENIZER, WIDTH)
    marks = [i for mark in (text.marks.open, text.marks.close) for i in ids_for(mark)]
    for _ in range(24):
        allowed = state.allowed()
        choices = {*ids_of(allowed.words, TOKENIZER.vocab_size)} - {EOS}
        if kept and (allowed.must_end or not choices or rng.random() < 0.3):
            count = rng.randint(1, len(kept))
            state.rollback(count)
            del kept[len(kept) - count :]
        elif choices:
            likely = sorted(choices.intersection(marks))
            token = rng.choice(likely if likely and rng.random() < 0.6 else sorted(choices))
            state.accept(token)
            kept.append(token)
        if rng.random() < 0.2:  # a hook may put in any token; it is taken back here
            state.accept(rng.randrange(TOKENIZER.vocab_size))
            state.rollback(1)
        fresh = Combined([text], TOKENIZER, WIDTH)
        for one in kept:
            fresh.accept(one)
        assert same(state, fresh)


@pytest.mark.parametrize(("budget", "thoughts"), [(0, ""), (1, "so"), (4, "a b c d")])
def test_masks_of_answers_behind_thoughts_are_computed_together(budget: int, thoughts: str) -> None:
    budget = min(budget, len(ids_for(thoughts)))
    states = [fed(Phases(SPECIAL, True, budget, "", WORD), thoughts) for _ in range(3)]
    for state in states:
        [phases] = state.parts
        assert phases.answer is phases  # there is none yet
        forced(state)
        state.accept(ids_for("a")[0])

    prepare(part for state in states for part in state.parts)

    words = [state.parts[0].answer.words for state in states]  # type: ignore[attr-defined]
    assert all(torch.equal(one, words[0]) for one in words)
