"""Conversations: what the cache keeps, what happens at every limit, turns taken back."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from chatting import EOS, Fake, notes, own, scripted, text_of

from exl2flow.core.errors import ContextOverflow
from exl2flow.engine.chat import Session, all_formats
from exl2flow.engine.filters import SelectFilter
from exl2flow.inference import Generator, SamplingSettings, load_model
from exl2flow.model.tensor_parallel.ranks import Ranks

RAW = all_formats()["raw"]
HOT = SamplingSettings(temperature=1.5, top_k=0, top_p=0.0)
SYSTEM = "Be good."


@pytest.fixture
def passes(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every pass over a prompt, and 1 for every decode step."""
    counts, steps = list[int](), generator._device_slots
    read, forward = steps.read, steps.forward

    def reading(ids: list[int], *given: object, **named: object) -> object:
        counts.append(len(ids))
        return read(ids, *given, **named)

    def decoding(*given: object, **named: object) -> object:
        counts.append(1)
        return forward(*given, **named)

    monkeypatch.setattr(steps, "read", reading)
    monkeypatch.setattr(steps, "forward", decoding)
    return counts


def test_ranks_draw_the_same_seed_for_a_conversation_without_one(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[int]()
    for _ in range(2):
        monkeypatch.setattr(Ranks, "seeds", random.Random(5))  # as all have it that have met
        found += [Session(generator, RAW).seed for _ in range(2)]

    assert found[:2] == found[2:]
    assert found[0] != found[1]


# -- the cache


def test_a_turn_forwards_only_what_is_new(generator: Generator, passes: list[int]) -> None:
    session = Session(generator, RAW, settings=HOT, seed=1, max_answer_tokens=20)
    list(session.reply("Hello"))
    for action in (session.retry, session.retry, None, None):
        before = len(session.context_ids("")) if action is None else 0
        passes.clear()
        pieces = session.reply("More") if action is None else action()
        next(pieces)
        counts = sum(passes)
        list(pieces)

        known = session.turns[-2].ids if action is None else ()
        new = 3 if action else len(generator.model.tokenizer.encode("User: More\nAssistant:\n")) + 4
        assert counts <= new, (known, before)
        found = session.statistics
        assert found.cached_tokens >= found.context_tokens - new
    session.undo()
    passes.clear()
    next(session.reply("Instead"))
    assert sum(passes) <= len(generator.model.tokenizer.encode("User: Instead\nAssistant:\n")) + 4


@pytest.mark.slow
def test_two_hundred_turns_in_a_context_of_512(folder: Path) -> None:
    model = load_model(folder, device="cpu", max_tokens=512)
    generator = Generator(model, tokens=512, slots=1)
    session = Session(
        generator, RAW, system=SYSTEM, settings=HOT, seed=5, max_answer_tokens=4, reserve=250
    )
    head = model.tokenizer.encode(f"{SYSTEM}\n", add_bos=True)
    prompts: list[list[int]] = []
    stream = generator.stream

    def recorded(request: object, **options: object) -> Iterator[object]:
        prompts.append(list(request.prompts[0]))  # type: ignore[attr-defined]
        return stream(request, **options)  # type: ignore[arg-type]

    generator.stream = recorded  # type: ignore[method-assign]
    words = random.Random(7)
    for number in range(200):
        list(session.reply(" ".join(words.choices(["fox", "dog", "Ada", "42"], k=number % 15))))

    assert len(session.turns) == len(prompts) == 200
    assert all(prompt[: len(head)] == head for prompt in prompts)
    assert all(len(prompt) <= 262 for prompt in prompts)
    assert max(map(len, prompts)) > 200  # no more was dropped than must
    gone = [turn.dropped for turn in session.turns]
    assert gone == sorted(gone, reverse=True)
    assert gone.count(False) > 5


def test_ids_of_many_turns_are_counted_by_a_stand_in() -> None:
    fake = Fake(lambda number, place: EOS if place == number % 9 else 50 + number, context=512)
    session = Session(fake, RAW, system=SYSTEM)

    for number in range(60):
        list(session.reply(f"Number {number}"))

    for number, turn in enumerate(session.turns):
        assert turn.ids == [50 + number] * (number % 9)
        assert turn.answer == fake.tokenizer.decode(turn.ids).lstrip()
    last = fake.prompts[-1]
    kept = [turn for turn in session.turns if not turn.dropped]
    for turn in kept[:-1]:
        assert str(turn.ids)[1:-1] in str(last)
    assert len(last) <= 262 < len(last) + 40


# -- limits


def test_the_oldest_messages_go_and_the_user_learns_of_it() -> None:
    fake = scripted("word " * 20, context=256)
    session = Session(fake, RAW, system=SYSTEM, reserve=60)
    seen = [notes(session.reply("word " * 10)) for _ in range(4)]

    assert seen[0] == ""
    assert "the oldest message and its answer are no longer read" in "".join(seen)
    assert session.turns[0].dropped
    assert not session.turns[-1].dropped


def test_a_message_that_is_too_long_is_cut_at_its_left() -> None:
    fake = scripted("Fine.", context=256)
    session = Session(fake, RAW, system=SYSTEM, reserve=60)
    list(session.reply("first"))
    long = " ".join(map(str, range(1000)))

    told = notes(session.reply(long))

    text = fake.tokenizer.decode(fake.prompts[-1])
    assert text.startswith(f"{SYSTEM}\nUser: ")
    assert text.endswith("997 998 999\nAssistant:")
    assert "too long: its first" in told
    assert 150 < len(fake.prompts[-1]) <= 196
    assert session.turns[-1].user == long
    assert session.turns[0].dropped


def test_a_system_prompt_that_is_too_long_is_refused() -> None:
    fake = scripted("Fine.", context=256)
    session = Session(fake, RAW)
    list(session.reply("a"))
    session.system = "word " * 300

    with pytest.raises(ContextOverflow, match=r"system prompt .* take \d+ tokens.*shorten"):
        list(session.reply("b"))

    assert [(turn.user, turn.dropped) for turn in session.turns] == [("a", False)]


def test_an_answer_that_fills_the_context_goes_on_without_a_gap() -> None:
    fake = Fake(lambda number, place: 60 + place % 40, context=256)
    session = Session(fake, RAW, system=SYSTEM, reserve=60, max_answer_tokens=400)
    list(session.reply("first"))
    fake.requests.clear()
    fake.prompts.clear()
    said = iter(range(10_000))
    fake._says = lambda number, place: 60 + next(said) % 200
    taken, before = list[int](), list[int]()
    stream = fake.stream

    def counted(*given: object, **named: object) -> Iterator[object]:
        before.append(len(taken))
        for event in stream(*given, **named):  # type: ignore[arg-type]
            if event.reason is None:
                taken.extend(event.ids)
            yield event

    fake.stream = counted  # type: ignore[method-assign]

    pieces = list(session.reply("second"))

    turn = session.turns[-1]
    assert len(fake.prompts) > 3
    assert turn.ids == taken[: len(turn.ids)]
    assert len(turn.ids) == 400
    assert [request.drawn for request in fake.requests] == before
    for prompt, end in zip(fake.prompts[1:], before[1:], strict=True):
        assert len(prompt) <= 196
        assert prompt[-60:] == turn.ids[:end][-60:]
    assert text_of(pieces) == turn.answer == fake.tokenizer.decode(turn.ids).lstrip()
    assert "no longer read" in notes(pieces)
    assert "stops at 400 tokens" in notes(pieces)


@pytest.mark.parametrize("settings", [SamplingSettings.greedy(), HOT])
def test_limit_and_more_give_the_text_of_one_run(
    generator: Generator, settings: SamplingSettings
) -> None:
    whole = Session(generator, RAW, settings=settings, seed=3, max_answer_tokens=70)
    parts = Session(generator, RAW, settings=settings, seed=3, max_answer_tokens=10)
    expected = text_of(whole.reply("Hello"))

    text = text_of(parts.reply("Hello"))
    while not parts.turns[-1].current.ended and len(parts.turns[-1].ids) < 80:
        text += text_of(parts.more())

    ids = whole.turns[-1].ids
    assert 60 < len(ids) <= 70
    assert parts.turns[-1].ids[: len(ids)] == ids
    assert text.startswith(expected)
    assert text == parts.turns[-1].answer


def test_filters_hold_over_more(generator: Generator) -> None:
    word = "the quick brown fox jumps over the lazy dog"
    session = Session(generator, RAW, filters=[SelectFilter([word])], max_answer_tokens=3, seed=1)

    text = text_of(session.reply("Say"))
    while not session.turns[-1].current.ended:
        text += text_of(session.more())

    assert text == word


def test_a_stop_string_within_a_token_leaves_the_text_before_it(generator: Generator) -> None:
    tokenizer = generator.model.tokenizer
    token, piece = next((i, p) for i, p in enumerate(tokenizer.pieces) if len(p.strip()) == 3)
    stopping = own("{{ messages[-1].content }}", stop_strings=(piece.strip()[1:],))
    bias = SamplingSettings.greedy(token_bias=((token, 1e4),))
    session = Session(generator, stopping, settings=bias)

    text = text_of(session.reply("a"))

    turn = session.turns[-1]
    assert turn.current.ended
    assert text == turn.answer == piece.strip()[0]
    assert tokenizer.decode(turn.ids).strip() == text


def test_what_a_message_displaced_comes_back_when_it_is_taken_back() -> None:
    fake = scripted("Fine.", context=256)
    session = Session(fake, RAW, system=SYSTEM, reserve=60)
    list(session.reply("first"))
    told = notes(session.reply("word " * 400))
    assert session.turns[0].dropped

    session.undo()
    list(session.reply("second"))

    assert "no longer read" in told
    assert [turn.dropped for turn in session.turns] == [False, False]
    assert "first" in fake.tokenizer.decode(fake.prompts[-1])


def test_retry_keeps_the_earlier_answer_and_back_brings_it_back(generator: Generator) -> None:
    session = Session(generator, RAW, settings=HOT, seed=3, max_answer_tokens=8)
    first = text_of(session.reply("Hello"))
    second, third = text_of(session.retry()), text_of(session.retry())
    assert len({first, second, third}) == 3

    shown = [session.turns[0].answer]
    for _ in range(3):
        session.back()
        shown.append(session.turns[0].answer)

    assert shown == [third, second, first, third]
    assert len(session.turns) == 1


def test_edit_forgets_what_follows() -> None:
    fake = scripted("A.", "B.", "C.", "D.")
    session = Session(fake, RAW, system="")
    for text in "abc":
        list(session.reply(text))

    list(session.edit(1, "other"))

    assert [(turn.user, turn.answer) for turn in session.turns] == [("a", "A."), ("other", "D.")]
    assert session.undo().user == "other"
    assert [turn.user for turn in session.turns] == ["a"]


def test_a_closed_answer_is_kept_and_goes_on(generator: Generator) -> None:
    whole = Session(generator, RAW, settings=HOT, seed=3, max_answer_tokens=40)
    list(whole.reply("Hello"))
    session = Session(generator, RAW, settings=HOT, seed=3, max_answer_tokens=40)

    pieces = session.reply("Hello")
    begun = "".join(next(pieces).text for _ in range(5))
    pieces.close()

    assert session.turns[0].answer == begun
    assert generator.is_idle
    assert session.statistics.answer_tokens == len(session.turns[0].ids)
    session.max_answer_tokens = 40 - len(session.turns[0].ids)
    assert begun + text_of(session.more()) == whole.turns[0].answer
    assert session.turns[0].ids == whole.turns[0].ids


def test_an_answer_ends_at_its_flag_even_between_pieces(generator: Generator) -> None:
    session = Session(generator, RAW, settings=HOT, seed=3, max_answer_tokens=40)
    unread, begun = session.reply("Hello"), session.reply("Hello")
    unread.abort_event.set()
    first = next(begun).text
    begun.abort_event.set()

    assert list(begun) == list(unread) == []
    assert [turn.answer for turn in session.turns] == [first]
    assert generator.is_idle
    again = session.retry()
    again.abort_event.set()
    assert list(again) == []
    assert [turn.answer for turn in session.turns] == [first]
    assert not session.turns[0].alternatives
    assert session.asked == 1


def test_a_new_message_ends_the_answer_under_way(generator: Generator) -> None:
    session = Session(generator, RAW, settings=HOT, seed=3, max_answer_tokens=20)
    pieces = session.reply("Hello")
    next(pieces)

    list(session.reply("Stop"))

    assert list(pieces) == []
    assert [turn.user for turn in session.turns] == ["Hello", "Stop"]
    assert generator.is_idle


def test_turns_that_are_equal_are_different_turns() -> None:
    session = Session(scripted("A.", "A.", "A.", "B."), RAW)
    for _ in range(3):
        list(session.reply("a"))

    list(session.edit(2, "b"))

    assert [(turn.user, turn.answer) for turn in session.turns] == [
        ("a", "A."),
        ("a", "A."),
        ("b", "B."),
    ]


def test_an_answer_that_ends_before_its_first_token_leaves_no_trace() -> None:
    fake = scripted("word " * 20, context=256)
    session = Session(fake, RAW, system=SYSTEM, reserve=60)
    while True:
        pieces = session.reply("word " * 10)
        if next(pieces).kind == "note":
            break
        list(pieces)
    before = [turn.user for turn in session.turns[:-1]]

    session.stop()
    assert not any(turn.dropped for turn in session.turns)
    list(session.reply("b"))

    assert [turn.user for turn in session.turns] == [*before, "b"]
    assert session.asked == len(session.turns)


def test_the_same_seed_gives_the_same_conversation(generator: Generator) -> None:
    talks = []
    for _ in range(2):
        session = Session(generator, RAW, settings=HOT, seed=3, max_answer_tokens=8)
        talks.append([text_of(session.reply(text)) for text in "abc"])

    assert talks[0] == talks[1]
