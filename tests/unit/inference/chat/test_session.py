"""Conversations: what is read, what is kept, and what happens at every limit."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from chatting import EOS, Fake, scripted, text_of
from tiny import make_tiny

from exl2flow.core.conversation import PromptFormat, Thinking
from exl2flow.core.errors import ChatTemplateError, ConfigError, ContextOverflow, InferenceError
from exl2flow.inference import Generator, SamplingSettings, load_model
from exl2flow.inference.chat import Session, all_formats
from exl2flow.inference.filters import SelectFilter

CHATML = all_formats()["chatml"]
RAW = all_formats()["raw"]
MARKS = ("<|im_start|>", "<|im_end|>")
HOT = SamplingSettings(temperature=1.5, top_k=0, top_p=0.0)
SYSTEM = "Be good."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=512)


@pytest.fixture
def generator(folder: Path) -> Generator:
    return Generator(load_model(folder, device="cpu"), tokens=1024, slots=1)


@pytest.fixture
def passes(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every pass over a prompt, and 1 for every decode step."""
    counts, steps = list[int](), generator._steps
    read, forward = steps.read, steps.forward

    def reading(ids: list[int], segments: object) -> object:
        counts.append(len(ids))
        return read(ids, segments)

    def decoding(*given: object, **named: object) -> object:
        counts.append(1)
        return forward(*given, **named)

    monkeypatch.setattr(steps, "read", reading)
    monkeypatch.setattr(steps, "forward", decoding)
    return counts


def own(template: str, **fields: object) -> PromptFormat:
    return PromptFormat(name="own", template=template, file=Path("own"), **fields)


def notes(pieces: object) -> str:
    return text_of(pieces, "note")


# -- what is read


def test_context_is_the_template_with_the_generated_ids() -> None:
    fake = scripted("Fine.", "Why?", marks=MARKS)
    session = Session(fake, CHATML, system=SYSTEM)
    letters = [fake.tokenizer.encode(letter)[0] for letter in "Fine."]
    fake._says = lambda number, place: [*letters, EOS][place]

    assert text_of(session.reply("How are you?")) == "Fine."
    assert text_of(session.reply("So?")) == "Fine."

    special = fake.tokenizer.encode
    head = f"<|im_start|>system\n{SYSTEM}\n<|im_end|>\n<|im_start|>user\nHow are you?<|im_end|>\n"
    head += "<|im_start|>assistant\n"
    then = "<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    assert fake.prompts[0] == special(head, special=True)
    assert fake.prompts[1] == [*fake.prompts[0], *letters, *special(then, special=True)]
    assert session.turns[0].ids == letters != fake.tokenizer.encode("Fine.")


def test_an_answer_that_the_template_changes_is_encoded() -> None:
    shouting = "{% for m in messages %}[{{ m.content | upper if loop.index == 2 else m.content }}]"
    fake = scripted("Fine.")
    session = Session(fake, own(shouting + "{% endfor %}"))
    for text in ("a", "b", "c"):
        list(session.reply(text))

    ids = session.context_ids("d")

    text = "[a][FINE.][b]["
    expected = fake.tokenizer.encode(text) + session.turns[1].ids
    expected += fake.tokenizer.encode("][c][") + session.turns[2].ids
    assert ids == expected + fake.tokenizer.encode("][d]")


def test_a_template_without_system_turns_gets_its_text_with_the_first_message() -> None:
    refusing = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}"
    fake = scripted("Fine.")
    session = Session(fake, own(refusing + "{% endif %}<{{ m.content }}>{% endfor %}"), system="S")
    list(session.reply("a"))

    assert fake.prompts == [fake.tokenizer.encode("<S\n\na>")]


@pytest.mark.parametrize("keep", [False, True])
def test_thoughts_are_shown_and_stay_out_of_the_context_unless_kept(keep: bool) -> None:
    said = "<think>\nLet me see.\n</think>\n\nFour."
    fake = scripted(said, marks=MARKS)
    session = Session(fake, all_formats()["qwen3"], keep_thinking=keep)

    pieces = list(session.reply("2 + 2?"))

    assert (text_of(pieces, "thinking"), text_of(pieces)) == ("Let me see.\n", "Four.")
    assert (session.turns[0].thinking, session.turns[0].answer) == ("Let me see.\n", "Four.")
    encode = fake.tokenizer.encode
    assert session.turns[0].ids == encode(said, special=True)
    rest = session.context_ids("b")[len(fake.prompts[0]) :]
    tail = encode(
        "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n", special=True
    )
    assert rest == (encode(said) if keep else encode("Four.")) + tail


@pytest.mark.parametrize("name", ["qwq", "deepseek-r1"])
@pytest.mark.parametrize("keep", [False, True])
def test_thoughts_that_the_prompt_begins(name: str, keep: bool) -> None:
    marks = (*MARKS, "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
    fake = scripted("Hm.\n</think>\n\nYes.", marks=marks)
    session = Session(fake, all_formats()[name], keep_thinking=keep, system="")

    pieces = list(session.reply("a"))

    assert (text_of(pieces, "thinking"), text_of(pieces)) == ("Hm.\n", "Yes.")
    text = fake.tokenizer.decode(session.context_ids("b"), special=True)
    past, _, _ = text.rpartition("b")
    assert past.count("<think>") == past.count("</think>") == keep
    assert ("Hm." in past, "Yes." in past) == (keep, True)


def test_channels_are_marks_of_thoughts_too() -> None:
    marks = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|return|>")
    final = "<|start|>assistant<|channel|>final<|message|>"
    fake = scripted(
        f"<|channel|>analysis<|message|>Hm.<|end|>{final}Yes.<|return|>",
        "<|channel|>final<|message|>No.<|return|>",
        marks=marks,
    )
    session = Session(fake, all_formats()["gpt-oss"])

    shown = [[(piece.kind, piece.text) for piece in session.reply(text)] for text in "ab"]

    texts = ["".join(text for kind, text in pieces if kind == "answer") for pieces in shown]
    assert texts == ["Yes.", "No."]
    assert [turn.thinking for turn in session.turns] == ["Hm.", ""]
    text = fake.tokenizer.decode(session.context_ids("c"), special=True)
    assert "Hm." not in text
    assert f"{final}Yes.<|end|>" in text
    assert f"{final}No.<|end|>" in text


def test_raw_is_a_log_with_names() -> None:
    fake = scripted(" Hello", " Bye\n")
    session = Session(fake, RAW, names=("Ada", "Bob"), system="A talk.")
    list(session.reply("a"))
    list(session.reply("b"))

    text = fake.tokenizer.decode(session.context_ids("c"))
    assert text == "A talk.\nAda: a\nBob: Hello\nAda: b\nBob: Bye\nAda: c\nBob:"
    session.system = None
    assert "Ada with Bob" in session.system


def test_amnesia_reads_the_last_message_only() -> None:
    fake = scripted("One.", "Two.")
    session = Session(fake, RAW, system="", amnesia=True)
    first, second = list(session.reply("a")), list(session.reply("b"))

    assert fake.tokenizer.decode(fake.prompts[1]) == "User: b\nAssistant:"
    assert [turn.dropped for turn in session.turns] == [True, False]
    assert notes(first) == notes(second) == ""


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


def test_two_hundred_turns_in_a_context_of_512(folder: Path) -> None:
    model = load_model(folder, device="cpu", max_tokens=512)
    generator = Generator(model, tokens=512, slots=1)
    session = Session(
        generator, RAW, system=SYSTEM, settings=HOT, seed=5, max_answer_tokens=6, reserve=100
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
        list(session.reply(" ".join(words.choices(["fox", "dog", "Ada", "42"], k=number % 30))))

    assert len(session.turns) == len(prompts) == 200
    assert all(prompt[: len(head)] == head for prompt in prompts)
    assert all(len(prompt) <= 412 for prompt in prompts)
    assert max(map(len, prompts)) > 330  # no more was dropped than must
    gone = [turn.dropped for turn in session.turns]
    assert gone == sorted(gone, reverse=True)
    assert gone.count(False) > 5


def test_ids_of_200_turns_are_counted_by_a_stand_in() -> None:
    fake = Fake(lambda number, place: EOS if place == number % 9 else 50 + number, context=512)
    session = Session(fake, RAW, system=SYSTEM)

    for number in range(200):
        list(session.reply(f"Number {number}"))

    for number, turn in enumerate(session.turns):
        assert turn.ids == [50 + number] * (number % 9)
        assert fake.prompts[number].count(50 + number) <= 1  # of the text itself
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
    assert "too long: the first" in told
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
    taken: list[int] = []
    stream = fake.stream

    def counted(*given: object, **named: object) -> Iterator[object]:
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
    for prompt, request in zip(fake.prompts[1:], fake.requests[1:], strict=True):
        assert len(prompt) <= 196
        assert request.drawn == sum(1 for _ in prompt_ids(turn.ids, prompt))
    assert text_of(pieces) == turn.answer == fake.tokenizer.decode(turn.ids).lstrip()
    assert "no longer read" in notes(pieces)
    assert "stops at 400 tokens; `more` goes on" in notes(pieces)


def prompt_ids(ids: list[int], prompt: list[int]) -> list[int]:
    """Return the beginning of an answer up to where a prompt ends in it."""
    tail = prompt[-20:]
    end = next(end for end in range(20, len(ids) + 1) if ids[end - 20 : end] == tail)
    return ids[:end]


@pytest.mark.parametrize("settings", [SamplingSettings.greedy(), HOT])
def test_limit_and_more_give_the_text_of_one_run(
    generator: Generator, settings: SamplingSettings
) -> None:
    whole = Session(generator, RAW, settings=settings, seed=3, max_answer_tokens=70)
    parts = Session(generator, RAW, settings=settings, seed=3, max_answer_tokens=10)
    expected = text_of(whole.reply("Hello"))

    text = text_of(parts.reply("Hello"))
    while not parts.turns[-1].current.ended and len(parts.turns[-1].ids) < 70:
        text += text_of(parts.more())

    assert parts.turns[-1].ids == whole.turns[-1].ids
    assert text == expected == parts.turns[-1].answer
    assert len(whole.turns[-1].ids) > 30


def test_filters_hold_over_more(generator: Generator) -> None:
    word = "the quick brown fox jumps over the lazy dog"
    session = Session(generator, RAW, filters=[SelectFilter([word])], max_answer_tokens=3, seed=1)

    text = text_of(session.reply("Say"))
    while not session.turns[-1].current.ended:
        text += text_of(session.more())

    assert text == word


def test_a_stop_string_within_a_token_leaves_the_text_before_it() -> None:
    stopping = own("{{ messages[-1].content }}", stop_strings=("#",))
    session = Session(scripted("a"), stopping)
    assert "#" in session._reader.stops


# -- turns


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


def test_a_new_message_ends_the_answer_under_way(generator: Generator) -> None:
    session = Session(generator, RAW, settings=HOT, seed=3, max_answer_tokens=20)
    pieces = session.reply("Hello")
    next(pieces)

    list(session.reply("Stop"))

    assert list(pieces) == []
    assert [turn.user for turn in session.turns] == ["Hello", "Stop"]
    assert generator.is_idle


def test_the_same_seed_gives_the_same_conversation(generator: Generator) -> None:
    talks = []
    for _ in range(2):
        session = Session(generator, RAW, settings=HOT, seed=3, max_answer_tokens=8)
        talks.append([text_of(session.reply(text)) for text in "abc"])

    assert talks[0] == talks[1]


# -- what fails


BAD = [
    ("reply", ("\udcff",), "broken UTF-8 at character 0"),
    ("reply", (b"a",), "a message is text"),
    ("edit", (3, "a"), "no turn 3; the last one is 0"),
    ("edit", (0, "\ud800"), "broken UTF-8"),
    ("back", (), "one answer only"),
    ("more", (), "is complete"),
]


@pytest.mark.parametrize(("name", "given", "message"), BAD)
def test_what_cannot_be_done_leaves_the_conversation(
    name: str, given: tuple[object, ...], message: str
) -> None:
    fake = scripted("Fine.")
    session = Session(fake, RAW)
    list(session.reply("a"))

    with pytest.raises(ConfigError, match=message):
        list(getattr(session, name)(*given) or ())

    assert [(turn.user, turn.answer) for turn in session.turns] == [("a", "Fine.")]
    assert text_of(session.reply("b")) == "Fine."


@pytest.mark.parametrize("name", ["more", "retry", "undo", "back"])
def test_without_a_turn_there_is_nothing_to_do(name: str) -> None:
    session = Session(scripted("Fine."), RAW)

    with pytest.raises(ConfigError, match="no turn -1; there is none yet"):
        getattr(session, name)()


@pytest.mark.parametrize(
    "wrong",
    [
        {"bans": [""]},
        {"bans": "word"},
        {"filters": [1]},
        {"adapters": ["lora"]},
        {"settings": SamplingSettings(cfg_scale=2.0)},
    ],
)
def test_values_out_of_range_are_refused_at_the_start_and_later(
    wrong: dict[str, object],
) -> None:
    fake = scripted("Fine.")
    with pytest.raises(ConfigError):
        Session(fake, RAW, **wrong)
    session = Session(fake, RAW)
    list(session.reply("a"))
    ((name, value),) = wrong.items()
    good = getattr(session, name)

    setattr(session, name, value)
    with pytest.raises(ConfigError):
        list(session.reply("b"))

    assert [turn.user for turn in session.turns] == ["a"]
    setattr(session, name, good)
    assert text_of(session.reply("b")) == "Fine."


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_answer_tokens": 0},
        {"reserve": "1"},
        {"seed": "x"},
        {"names": ("A", "A")},
        {"names": ("", "B")},
        {"system": "\ud800"},
    ],
)
def test_a_session_cannot_begin_with_such_values(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Session(scripted("Fine."), RAW, **wrong)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles') }}",
        "{{ 'a' * 10000000000000 }}",
        "{{ messages[7].content }}",
    ],
)
def test_a_hostile_template_is_an_error_and_another_one_goes_on(template: str) -> None:
    fake = scripted("Fine.")
    session = Session(fake, RAW)
    list(session.reply("a"))
    session.format = own(template)

    with pytest.raises(ChatTemplateError, match="choose another format, or change the system"):
        list(session.reply("b"))
    with pytest.raises(ChatTemplateError, match="does not compile"):
        session.format = own("{% if %}")

    assert [turn.user for turn in session.turns] == ["a"]
    assert session.format.template == template
    session.format = RAW
    assert text_of(session.reply("b")) == "Fine."


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | reverse }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }} {% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
        "{{ messages[-1].content }}",
        "{% for m in messages %}{{ m.content[:9] }}{% endfor %}",
    ],
)
def test_no_marker_reaches_the_model(template: str) -> None:
    fake = scripted("Fine. ", "Well,", "So")
    session = Session(fake, own(template))
    for text in "abc":
        list(session.reply(text))

    text = fake.tokenizer.decode(session.context_ids("d"))

    spelled = session._reader._rendered("", list("abcd"), ["Fine.", "Well,", "So"])
    assert session._reader._secret[:4] not in text
    assert text.replace(" ", "") == spelled.replace(" ", "")


def test_an_error_of_the_model_ends_the_answer_and_not_the_session(generator: Generator) -> None:
    session = Session(generator, RAW, settings=HOT, seed=3, max_answer_tokens=10)
    list(session.reply("a"))
    norm = generator.model.decoder.head.norm if hasattr(generator.model.decoder.head, "norm") else 0
    del norm
    stream, failing = generator.stream, {"after": 3}

    def broken(*given: object, **named: object) -> Iterator[object]:
        for count, event in enumerate(stream(*given, **named)):  # type: ignore[arg-type]
            if count > failing["after"]:
                raise MemoryError("no memory is left")
            yield event

    generator.stream = broken  # type: ignore[method-assign]
    with pytest.raises(InferenceError, match="the answer failed: no memory is left"):
        list(session.reply("b"))
    kept = session.turns[-1].answer
    failing["after"] = -1
    with pytest.raises(InferenceError, match="no memory"):
        list(session.reply("c"))
    assert [turn.user for turn in session.turns] == ["a", "b"]
    assert kept

    generator.stream = stream  # type: ignore[method-assign]
    assert text_of(session.more())


def test_a_format_with_its_own_thoughts() -> None:
    marks = Thinking("[[", "]]")
    fake = scripted("[[ hm ]] yes")
    session = Session(fake, own("{{ messages[-1].content }}", thinking=marks))

    pieces = list(session.reply("a"))

    assert (text_of(pieces, "thinking"), text_of(pieces)) == ("hm ", "yes")
