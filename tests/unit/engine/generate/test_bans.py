from outputs import Run, run_of
from spelled import EOS

from exl2flow.core.errors import InferenceError, TextStuck


def test_banned_string_cuts_the_text_back() -> None:
    run = Run(["I ", "del", "ve", "dig"], banned_strings=("delve",))

    run.push("I ")
    assert run.push("del") is None
    event = run.push("ve")

    assert event is not None
    assert (event.suppressed_text, event.suppressed_ids) == ("delve", (3, 4))
    assert run.output.ids == [2]
    assert run.output.blocked() == {3}
    assert run.output.blocked(1) == set()
    run.push("dig")
    assert run.text == "I dig"
    assert run.output.blocked() == set()


def test_banned_tokens_of_a_position_accumulate() -> None:
    run = Run(["delve", "Delve", "d", "elve"], banned_strings=("DELVE",))

    run.push("delve", "Delve", "d", "elve")

    assert run.rewinds == [1, 1, 2]
    assert run.output.blocked() == {2, 3, 4}
    assert run.output.new_tokens == 0


def test_banned_string_is_cut_where_it_begins_not_where_it_could_have() -> None:
    run = Run(["a", "b"], banned_strings=("aab",))

    run.push("a", "a", "a", "b")

    assert run.rewinds == [3]
    assert run.text == "a"
    assert run.output.ids == [2]


def test_bans_of_later_positions_end_with_an_earlier_rewind() -> None:
    run = Run(["a", "b", "c", "d"], banned_strings=("abc", "bd"))

    run.push("a", "b", "d")
    assert run.rewinds == [2]
    assert run.output.blocked() == {3}
    run.push("c")
    assert run.text == "ac"
    assert run.output.blocked() == set()
    run.push("a", "b", "c")

    assert run.rewinds == [2, 3]
    assert run.output.blocked() == {2}
    assert run.output.blocked(1) == set()


def test_banned_string_that_completes_with_the_last_token_is_not_shown() -> None:
    run = Run(["del", "ve", "dig"], banned_strings=("delve",), max_new_tokens=2)

    run.push("del", "ve")
    assert run.rewinds == [2]
    run.push("dig", "dig")

    assert run.text == "digdig"
    assert run.output.new_tokens == 2


def test_banned_string_takes_precedence_over_a_later_stop_string() -> None:
    run = Run(["no way. END"], banned_strings=("no way",), stops=("END",))

    run.push("no way. END")
    assert run.rewinds == [1]


def test_stop_string_inside_a_banned_one_ends_the_text() -> None:
    run = run_of("foo", "bar", banned_strings=("foobarbaz",), stops=("oo",))

    assert (run.text, run.end.reason) == ("f", "stop_string")


def test_stop_token_after_half_a_banned_string_shows_it() -> None:
    assert run_of("del", b"", banned_strings=("delve",)).text == "del"


def test_cut_tokens_do_not_count_towards_the_least() -> None:
    run = Run(["a", "x", "y"], banned_strings=("xy",), min_new_tokens=2)

    run.push("a", "x")
    assert EOS not in run.output.blocked()
    run.push("y")

    assert run.output.blocked() == {EOS, 3}


def test_passage_that_begins_again_is_blocked_where_it_went_on() -> None:
    run = Run(["I ", "del", "ve", "iver"], banned_strings=("delve",))

    run.push("I ", "del", "ve", "del")  # a constraint allows nothing else
    assert (run.output.cut(), run.output.blocked()) == ([(4,)], {4})
    run.push("iver", "del")
    assert (run.text, run.output.blocked()) == ("I deliver", set())


def test_error_of_many_bans_names_some() -> None:
    run = Run(["a"], banned_strings=("a", *(f"{i}{'x' * 99}" for i in range(500))))

    run.push("a", "a")

    assert isinstance(run.end.error, TextStuck)
    assert len(str(run.end.error)) < 500


def test_hook_that_insists_on_a_banned_string_ends_the_text() -> None:
    run = Run(["del", "ve"], banned_strings=("delve",))

    run.push("del", "ve", "del", "ve")

    assert isinstance(run.end.error, InferenceError)


def test_bans_that_leave_no_token_end_the_text() -> None:
    run = Run(["a"], banned_strings=("a",))

    run.push("a", "a")

    assert run.end.reason == "error"
    assert isinstance(run.end.error, InferenceError)
    assert "'a'" in str(run.end.error)


def test_banned_string_is_not_shown_after_a_cut_either() -> None:
    run = Run(["ab", "b", "c", "d"], banned_strings=("bc",))

    run.push("ab", "b", "c")
    assert (run.text, run.rewinds) == ("ab", [2])
    run.push("c", "d")

    assert run.rewinds == [2, 1]
    assert run.text == "abd"


def test_stop_string_is_not_shown_after_a_cut_either() -> None:
    run = run_of("a\n", "b", "c", "\n", banned_strings=("bc",), stops=("\n\n",))

    assert run.rewinds == [2]
    assert (run.text, run.end.reason) == ("a\n", "stop_string")


def test_token_whose_text_came_with_a_later_one_is_banned_itself() -> None:
    run = Run([b"A\x80", "z"], banned_strings=("a",))

    run.push(b"A\x80", "z")

    assert run.rewinds == [2]
    assert run.output.blocked() == {run.ids[b"A\x80"]}


def test_string_that_begins_with_parts_of_a_character_is_cut_before_them() -> None:
    run = Run(["a", b"\xf0\x9f", b"\x99\x82", "b"], banned_strings=("🙂b",))

    run.push("a", b"\xf0\x9f", b"\x99\x82", "b")

    assert run.rewinds == [3]
    assert run.output.blocked() == {run.ids[b"\xf0\x9f"]}


def test_banned_character_is_banned_by_its_first_token() -> None:
    run = Run([b"\xf0\x9f", b"\x99\x82", "a"], banned_strings=("🙂",))

    run.push("a", b"\xf0\x9f", b"\x99\x82")

    assert run.rewinds == [2]
    assert run.output.ids == [run.ids[b"a"]]
