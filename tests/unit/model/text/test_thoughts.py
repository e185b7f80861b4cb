"""Thoughts are separated from the answer wherever the text is cut."""

from itertools import pairwise

import pytest
from chatting import tokenizer_with
from hypothesis import given
from hypothesis import strategies as st

from exl2flow.core.requests.conversation import Thinking
from exl2flow.model.text.thoughts import Splitter, first_of_answer

MARKS = Thinking("<think>", "</think>", "<answer>")
TEXTS = [
    ("<think>a < b</thin </think>\n\nYes </think>", False, "a < b</thin ", "Yes </think>"),
    ("  \n<think>\n\nx</think>", False, "x", ""),
    ("x</think> y", True, "x", "y"),
    ("no thoughts <think>", False, "", "no thoughts <think>"),
    ("<answer>direct", False, "", "direct"),
    ("<thinking>", False, "", "<thinking>"),
    ("<think>never ends </th", False, "never ends </th", ""),
    ("<thi", False, "", "<thi"),
    ("   ", False, "", ""),
    ("", True, "", ""),
    ("</think>only", True, "", "only"),
]


@pytest.mark.parametrize(("text", "opened", "thinking", "answer"), TEXTS)
@given(cuts=st.lists(st.integers(0, 50), max_size=12))
def test_thoughts_and_answer_do_not_depend_on_how_text_arrives(
    text: str, opened: bool, thinking: str, answer: str, cuts: list[int]
) -> None:
    splitter = Splitter(MARKS, opened=opened)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    found = []
    for begin, end in pairwise(places):
        found += splitter.push(text[begin:end])
    found += splitter.push("", ends=True)

    joined = {k: "".join(t for kind, t in found if kind == k) for k in ("thinking", "answer")}
    assert joined == {"thinking": thinking, "answer": answer}


def test_without_marks_all_is_the_answer() -> None:
    splitter = Splitter(None, opened=False)

    assert splitter.push(" \n<think>") == [("answer", "<think>")]
    assert splitter.push("  x ") == [("answer", "  x ")]


@pytest.mark.parametrize(
    ("text", "opened", "rest"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Yes."),
        ("Hm.</think>Yes.", True, "Yes."),
        ("Hm.", True, ""),
        ("<think>Hm.", False, ""),
        ("Yes.", False, "Yes."),
        ("<answer>Yes.", False, "Yes."),
        ("", False, ""),
    ],
)
def test_ids_of_the_answer_begin_after_the_thoughts(text: str, opened: bool, rest: str) -> None:
    tokenizer = tokenizer_with()
    ids = tokenizer.encode(text)

    first = first_of_answer(ids, MARKS, tokenizer, opened=opened)

    assert tokenizer.decode(ids[first:]) == rest
    assert first_of_answer(ids, None, tokenizer, opened=opened) == 0
