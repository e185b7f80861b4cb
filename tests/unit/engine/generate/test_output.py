from pathlib import Path
from typing import Any

import pytest
from outputs import MANY, Run, run_of
from spelled import EOS, sentencepiece_tokenizer

from exl2flow.core.errors import InferenceError
from exl2flow.core.requests.request import Request
from exl2flow.engine.generate.event import Token
from exl2flow.engine.generate.output import Output
from exl2flow.engine.generate.prompt import Prompt


def test_text_is_shown_token_by_token() -> None:
    run = run_of("One", " two", " three", max_new_tokens=3)

    assert [event.text for event in run.events] == ["One", " two", " three"]
    assert [event.ids for event in run.events] == [(2,), (3,), (4,)]
    assert run.end.reason == "max_new_tokens"
    assert run.text == "One two three"
    assert run.output.new_tokens == 3


def test_stop_token_is_not_shown() -> None:
    run = run_of("One", " two", b"")

    assert run.text == "One two"
    assert run.shown_ids == run.output.ids == [2, 3]
    assert (run.end.reason, run.end.trigger) == ("stop_token", EOS)
    assert run.end.held is not None
    assert (run.end.held.ids, run.end.held.text) == ((EOS,), "")
    assert run.output.new_tokens == 3


def test_stop_token_with_text_keeps_it_in_held() -> None:
    run = Run(["One", ".", " two"], stops=(3,))
    run.push("One", ".")

    assert run.text == "One"
    assert run.end.held is not None
    assert (run.end.held.ids, run.end.held.text) == ((3,), ".")


def test_text_held_when_a_stop_token_comes_is_shown() -> None:
    run = run_of("One\n", b"", stops=(EOS, "\n\n"))

    assert run.text == "One\n"
    assert run.shown_ids == [2]


def test_without_stops_the_text_runs_through_eos() -> None:
    run = run_of("One", b"", " two", stops=(), max_new_tokens=3)

    assert run.text == "One two"
    assert run.shown_ids == [2, EOS, 3]
    assert run.end.reason == "max_new_tokens"


def test_special_tokens_are_spelled_on_request() -> None:
    run = run_of("One", b"", " two", stops=(), max_new_tokens=3, decode_special=True)

    assert run.text == "One</s> two"


@pytest.mark.parametrize(
    "pieces",
    [("a STOP b",), (" ST", "OP"), ("a S", "TO", "P b"), (" ", "S", "T", "OP"), ("a", " S", "TOP")],
)
def test_stop_string_over_several_tokens_is_never_shown(pieces: tuple[str, ...]) -> None:
    run = run_of("One", *pieces, "more", stops=("STOP",))

    joined = "One" + "".join(pieces)
    before, _, after = joined.partition("STOP")
    assert run.text == before
    assert (run.end.reason, run.end.trigger) == ("stop_string", "STOP")
    assert run.end.held is not None
    assert run.end.held.text == "STOP" + after
    assert run.shown_ids == run.output.ids  # with the tokens of the stop string
    assert run.shown_ids[-len(run.end.held.ids) :] == list(run.end.held.ids)


def test_beginning_of_a_stop_string_is_shown_if_it_goes_on_otherwise() -> None:
    run = Run(["One ", "ST", "O", "VE"], stops=("STOP",))

    run.push("One ")
    assert run.push("ST") is None
    assert run.push("O") is None
    last = run.push("VE")

    assert last is not None
    assert (last.text, last.ids) == ("STOVE", (3, 4, 5))


def test_tokens_before_a_possible_stop_string_do_not_wait() -> None:
    run = Run(["a\n", "b\n", "c"], stops=("\n\n",))

    run.push("a\n", "b\n")

    assert run.text == "a\n"


@pytest.mark.parametrize("stops", [("abc", "abd"), ("abd", "abc"), ("abde", "abd")])
@pytest.mark.parametrize("pieces", [("xab", "d"), ("xa", "bd"), ("x", "a", "b", "d"), ("xabd",)])
def test_stop_strings_may_share_a_prefix(stops: tuple[str, ...], pieces: tuple[str, ...]) -> None:
    run = run_of(*pieces, stops=stops)

    assert run.text == "x"
    assert run.end.trigger == "abd"


def test_possible_stop_string_does_not_hide_a_whole_one() -> None:
    run = run_of("a", "bc", stops=("abcdef", "bc"))

    assert (run.text, run.end.trigger) == ("a", "bc")


def test_earliest_stop_string_counts() -> None:
    run = run_of("one two three", stops=("three", "two", "one two four"))

    assert (run.text, run.end.trigger) == ("one ", "two")


def test_stop_strings_are_exact() -> None:
    assert run_of("stop", "Stop", "STOP", stops=("STOP",)).text == "stopStop"


@pytest.mark.parametrize(
    ("last", "stop", "text", "reason"),
    [(".\n", "\n", "One.", "stop_string"), (" ST", "STOP", "One ST", "max_new_tokens")],
)
def test_stop_string_in_the_last_token_is_shown_only_in_part(
    last: str, stop: str, text: str, reason: str
) -> None:
    run = run_of("One", last, stops=(stop,), max_new_tokens=2)

    assert (run.text, run.end.reason) == (text, reason)


def test_stop_string_longer_than_the_text_does_no_harm() -> None:
    long = "a" * 5_000 + "b"

    assert run_of(*["a"] * 50, max_new_tokens=50, stops=(long,), banned_strings=(long,)).text == (
        "a" * 50
    )


def test_character_over_several_tokens_is_shown_once_and_whole() -> None:
    parts = [bytes([byte]) for byte in "🙂".encode()]
    run = run_of("a", *parts, "b", max_new_tokens=6)

    assert [event.text for event in run.events] == ["a", "🙂", "b"]
    assert [len(event.ids) for event in run.events] == [1, 4, 1]


def test_character_that_stays_incomplete_is_shown_when_the_text_ends() -> None:
    run = run_of("a", b"\xf0\x9f", b"")

    assert run.text == "a\ufffd"
    assert run.shown_ids == [2, 3]


def test_many_replacement_characters_are_not_held_forever() -> None:
    run = run_of(*[b"\x80"] * 20, max_new_tokens=MANY)

    assert 15 <= len(run.text) <= 20


def test_stop_string_beside_half_a_character_is_not_shown() -> None:
    run = run_of("One ", b"STOP\xf0", max_new_tokens=2, stops=("STOP",))

    assert run.text == "One "


def test_stop_tokens_are_blocked_until_the_least_number_is_reached() -> None:
    run = Run(["a"], min_new_tokens=2)

    assert [run.output.blocked(ahead) for ahead in range(3)] == [{EOS}, {EOS}, set()]
    run.push("a", "a")
    assert run.output.blocked() == set()


def test_stop_string_ends_the_text_before_the_least_number() -> None:
    assert run_of("a\n", stops=("\n",), min_new_tokens=5).end.reason == "stop_string"


def test_only_hooks_and_bans_wait() -> None:
    assert not Run(["a"], min_new_tokens=3, stops=("a",)).output.waits
    assert Run(["a"], banned_strings=("a",)).output.waits
    assert Run(["a"], hooks=(print,)).output.waits


def test_extras_stay_with_their_tokens() -> None:
    run = Run(["a", "ST", "AY"], stops=("STOP",), probabilities=True, top_tokens=1, logits=True)

    run.push("a", probability=0.5, top_ids=(2,), top_probabilities=(0.5,), logits="row 1")
    run.push("ST", probability=0.25, top_ids=(7,), top_probabilities=(0.75,), logits="row 2")
    run.push("AY", probability=0.125, top_ids=(8,), top_probabilities=(0.5,), logits="row 3")

    first, second = run.events
    assert (first.probabilities, first.logits) == ((0.5,), ("row 1",))
    assert second.probabilities == (0.25, 0.125)
    assert (second.top_ids, second.top_probabilities) == (((7,), (8,)), ((0.75,), (0.5,)))


def test_extras_that_nobody_wants_are_left_out() -> None:
    (event,) = [Run(["a"]).push("a", probability=0.5, top_ids=(2,), logits="row")]

    assert event is not None
    assert (event.probabilities, event.top_ids, event.logits) == ((), (), ())


@pytest.mark.parametrize("reason", ["cancelled", "error", "max_new_tokens"])
def test_text_that_is_ended_from_outside_shows_held_text(reason: Any) -> None:
    error = InferenceError("no") if reason == "error" else None
    run = Run(["One", " ST", b"\xf0"], stops=("STOP",), tag="mine")
    run.push("One", " ST", b"\xf0")

    last = run.output.finish(reason, error=error)

    assert (run.text, last.text) == ("One", " ST\ufffd")
    assert (last.reason, last.error, last.tag) == (reason, error, "mine")


@pytest.mark.parametrize("prompt", ["", "The quick", "🙂🙂🙂"])
def test_text_of_a_tokenizer_that_drops_spaces_is_the_decoded_text(
    prompt: str, tmp_path: Path
) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path)
    ids = tokenizer.encode("The quick fox 🙂👩‍👩‍👧 jumps  over\n\n naïve dogs")
    begin = Prompt((tuple(tokenizer.encode(prompt, add_bos=True)),))
    request = Request(prompt, stops=("\n\n\n",), banned_strings=("lazy dog",))
    output = Output(request, tokenizer, begin, max_new_tokens=len(ids))

    events = [output.push(Token(token_id)) for token_id in ids]

    whole = tokenizer.decode([*begin.sequences[0], *ids])
    assert "".join(event.text for event in events if event) == whole.removeprefix(prompt)
    assert output.reason == "max_new_tokens"
