from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import Run, run_of
from spelled import EOS, split

from exl2flow.engine.generate.event import Token

TEXTS = st.text(alphabet="abAB \n🙂é", max_size=40)
STRINGS = st.lists(st.text(alphabet="abAB \n🙂é", min_size=1, max_size=4), max_size=3)
CUTS = st.lists(st.integers(0, 200), max_size=40)


@settings(deadline=None)
@given(TEXTS, CUTS)
def test_no_character_is_lost_or_doubled(text: str, cuts: list[int]) -> None:
    pieces = split(text.encode(), cuts)
    run = run_of(*pieces, b"")

    assert run.text == text
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
        event = run.output.push(Token(engine[-1]))
        if event is not None:
            run.events.append(event)
            del engine[len(engine) - len(event.suppressed_ids) :]
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
