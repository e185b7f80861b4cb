from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spelled import EOS, spelled, split

from exl2flow.core.errors import InferenceError
from exl2flow.inference.generate.event import Event, Token
from exl2flow.inference.generate.loops import is_loop
from exl2flow.inference.generate.output import Outcome, Output
from exl2flow.inference.generate.prompt import Prompt, encoded
from exl2flow.inference.generate.request import Request

PROMPT = (1,)
MANY = 10_000


class Run:
    """Feeds tokens to an `Output`, and keeps what came of it."""

    def __init__(
        self, vocabulary: Sequence[bytes | str], prompt: Prompt | None = None, **asked: Any
    ):
        self.tokenizer, self.ids = spelled(["prompt", *vocabulary])
        self.most = asked.setdefault("max_new_tokens", MANY)
        request = Request(PROMPT, **asked)
        self.output = Output(
            request, self.tokenizer, prompt or Prompt((PROMPT,)), max_new_tokens=self.most
        )
        self.events: list[Event] = []
        self.rewinds: list[int] = []

    def push(self, *pieces: bytes | str, **extras: Any) -> Outcome:
        for piece in pieces:
            key = piece.encode() if isinstance(piece, str) else piece
            outcome = self.output.push(Token(self.ids[key], **extras))
            self.keep(outcome)
        return outcome

    def keep(self, outcome: Outcome) -> None:
        if outcome.event is not None:
            self.events.append(outcome.event)
        if outcome.rewind:
            self.rewinds.append(outcome.rewind)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def shown_ids(self) -> list[int]:
        return [token_id for event in self.events for token_id in event.ids]

    @property
    def end(self) -> Event:
        (*others, last) = self.events
        assert last.reason == self.output.reason
        assert all(event.reason is None for event in others)
        return last


def run_of(*pieces: bytes | str, **asked: Any) -> Run:
    """Push pieces until the text ends."""
    run = Run(pieces, **asked)
    for piece in pieces:
        if run.output.reason is None:
            run.push(piece)
    return run


def test_text_is_shown_token_by_token() -> None:
    run = run_of("One", " two", " three", max_new_tokens=3)

    assert [event.text for event in run.events] == ["One", " two", " three"]
    assert [event.ids for event in run.events] == [(2,), (3,), (4,)]
    assert run.end.reason == "max_new_tokens"
    assert run.output.text == "One two three"
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
    assert run.text == run.output.text == before
    assert (run.end.reason, run.end.trigger) == ("stop_string", "STOP")
    assert run.end.held is not None
    assert run.end.held.text == "STOP" + after
    assert run.shown_ids == run.output.ids  # with the tokens of the stop string
    assert run.shown_ids[-len(run.end.held.ids) :] == list(run.end.held.ids)


def test_beginning_of_a_stop_string_is_shown_if_it_goes_on_otherwise() -> None:
    run = Run(["One ", "ST", "O", "VE"], stops=("STOP",))

    run.push("One ")
    assert run.push("ST").event is None
    assert run.push("O").event is None
    last = run.push("VE").event

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


def test_stop_string_in_the_last_token_is_not_shown() -> None:
    run = run_of("One", ".\n", stops=("\n",), max_new_tokens=2)

    assert run.text == "One."
    assert run.end.reason == "stop_string"


def test_beginning_of_a_stop_string_is_shown_when_the_text_ends() -> None:
    run = run_of("One", " ST", stops=("STOP",), max_new_tokens=2)

    assert run.text == "One ST"
    assert run.end.reason == "max_new_tokens"


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


def test_banned_string_cuts_the_text_back() -> None:
    run = Run(["I ", "del", "ve", "dig"], banned_strings=("delve",))

    run.push("I ")
    assert run.push("del").event is None
    outcome = run.push("ve")

    assert outcome.rewind == 2
    assert outcome.event is not None
    assert (outcome.event.suppressed_text, outcome.event.suppressed_ids) == ("delve", (3, 4))
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

    assert run.push("del", "ve").rewind == 2
    run.push("dig", "dig")

    assert run.text == "digdig"
    assert run.output.new_tokens == 2


def test_banned_string_comes_before_a_stop_string_behind_it() -> None:
    run = Run(["no way. END"], banned_strings=("no way",), stops=("END",))

    assert run.push("no way. END").rewind == 1


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


def test_bans_that_leave_no_token_end_the_text() -> None:
    run = Run(["a"], banned_strings=("a",))

    run.push("a", "a")

    assert run.end.reason == "error"
    assert isinstance(run.end.error, InferenceError)
    assert "'a'" in str(run.end.error)


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
    (event,) = [Run(["a"]).push("a", probability=0.5, top_ids=(2,), logits="row").event]

    assert event is not None
    assert (event.probabilities, event.top_ids, event.logits) == ((), (), ())


@pytest.mark.parametrize("reason", ["cancelled", "error", "max_new_tokens"])
def test_text_that_ends_from_outside_shows_what_was_held(reason: Any) -> None:
    error = InferenceError("no") if reason == "error" else None
    run = Run(["One", " ST", b"\xf0"], stops=("STOP",), tag="mine")
    run.push("One", " ST", b"\xf0")

    last = run.output.finish(reason, error=error)

    assert (run.text, last.text) == ("One", " ST\ufffd")
    assert (last.reason, last.error, last.tag) == (reason, error, "mine")


def test_healed_token_adds_only_what_the_prompt_lacks() -> None:
    vocabulary = ["wor", "world", "work", " hello"]
    tokenizer, ids = spelled(["prompt", *vocabulary])
    prompt = encoded(Request((1, ids[b"wor"]), heal=True), tokenizer)
    run = Run(vocabulary, prompt=prompt, heal=True, max_new_tokens=1)

    assert prompt == Prompt(((1,),), healed=ids[b"wor"])
    assert run.output.healing == (2, 3, 4)
    assert run.output.new_tokens == -1
    run.push("world")
    assert run.text == "ld"
    assert run.output.healing is None
    assert run.output.new_tokens == 0
    run.push(" hello")
    assert (run.text, run.output.new_tokens) == ("ld hello", 1)
    assert run.shown_ids == [3, 5]


def test_last_token_of_the_prompt_does_not_stop_the_text_that_heals_it() -> None:
    prompt = Prompt((PROMPT,), healed=2)
    run = Run(["\n", "\n\n"], prompt=prompt, stops=(2, 3), min_new_tokens=1)

    assert run.output.blocked() == {3}
    run.push("\n")
    assert (run.output.reason, run.output.ids) == (None, [2])

    assert Run(["\n", "\n\n"], prompt=prompt, stops=(3,)).push("\n\n").event is not None


def test_banned_suffix_of_a_healed_token_heals_again() -> None:
    run = Run(
        ["I ", "I delve", "dig"], prompt=Prompt((PROMPT,), healed=2), banned_strings=("delve",)
    )

    assert run.push("I delve").rewind == 1
    assert run.output.healing == (2, 3)
    assert run.output.blocked() == {3}
    run.push("I ", "dig")

    assert run.text == "dig"


@pytest.mark.parametrize("period", [1, 7, 32, 100, 256])
def test_loop_ends_the_text(period: int) -> None:
    passage = [f"{index:03} " for index in range(period)]
    run = run_of("Once ", *passage * (1_200 // period + 1), end_loops=True)

    assert run.end.reason == "loop"
    assert run.output.new_tokens <= max(128, 4 * period) + 32
    assert run.text == "Once " + ("".join(passage) * 1_200)[: len(run.text) - 5]


def test_loops_go_on_unless_they_are_to_end() -> None:
    assert run_of(*["a"] * 1_000).output.reason is None


def test_repetition_with_changes_is_no_loop() -> None:
    rows = [token for row in range(100) for token in (1, 2, 3, 4, 5, 6, 7, 1_000 + row)]

    assert not any(is_loop(rows[:count]) for count in range(len(rows)))
    assert not is_loop([1] * 127)
    assert is_loop([*range(128), *[1] * 128])


TEXTS = st.text(alphabet="abAB \n🙂é", max_size=40)
STRINGS = st.lists(st.text(alphabet="abAB \n🙂é", min_size=1, max_size=4), max_size=3)
CUTS = st.lists(st.integers(0, 200), max_size=40)


@settings(deadline=None)
@given(TEXTS, CUTS)
def test_no_character_is_lost_or_doubled(text: str, cuts: list[int]) -> None:
    pieces = split(text.encode(), cuts)
    run = run_of(*pieces, b"")

    assert run.text == run.output.text == text
    assert len(run.shown_ids) == len(pieces)


@settings(deadline=None)
@given(TEXTS, CUTS, STRINGS)
def test_no_stop_string_is_shown_however_the_text_is_split(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    pieces = split(text.encode(), cuts)
    run = run_of(*pieces, b"", stops=(EOS, *stops))

    assert run.end.held is not None
    assert not any(stop in run.text for stop in stops)
    if any(stop in text for stop in stops):
        assert text.startswith(run.text + run.end.held.text)
        assert run.end.held.text.startswith(str(run.end.trigger))
    else:
        assert (run.text, run.end.reason) == (text, "stop_token")


@settings(deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=3), max_size=6),
    STRINGS,
    STRINGS,
    st.integers(1, 12),
    st.integers(0, 2**32),
)
def test_no_banned_string_is_shown_whatever_is_sampled(
    extra: list[bytes], bans: list[str], stops: list[str], most: int, seed: int
) -> None:
    letters = [letter.encode() for letter in "abAB "]
    vocabulary = [*letters, b"z", b"ab", b" b", *"é🙂".encode().partition(b"\xa9"), *extra]
    run = Run(
        [piece for piece in vocabulary if piece],
        banned_strings=bans,
        stops=stops,
        max_new_tokens=most,
    )
    generator, engine = Random(seed), []

    for _ in range(2_000):
        choices = sorted(set(range(2, len(run.ids))) - run.output.blocked())
        engine.append(generator.choice(choices))
        outcome = run.output.push(Token(engine[-1]))
        run.keep(outcome)
        del engine[len(engine) - outcome.rewind :]
        assert run.output.ids == engine
        if run.output.reason is not None:
            break

    assert run.end.reason in ("max_new_tokens", "stop_string")
    assert not any(ban.casefold() in run.text.casefold() for ban in bans)
    assert not any(stop in run.text for stop in stops)
    assert run.end.held is not None
    whole = run.text + run.end.held.text
    if whole.count("\ufffd") < 5:  # of more, the last may have been shown before its character
        assert whole == run.tokenizer.decode(engine)
