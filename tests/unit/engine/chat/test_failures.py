"""What cannot be done is one clear error, and the conversation stays as it was."""

from collections.abc import Iterator

import pytest
from chatting import own, scripted, text_of

from exl2flow.core.errors import ChatTemplateError, ConfigError, InferenceError
from exl2flow.engine.chat import Session, all_formats
from exl2flow.inference import Generator, SamplingSettings

RAW = all_formats()["raw"]
HOT = SamplingSettings(temperature=1.5, top_k=0, top_p=0.0)


BAD = [
    ("reply", ("\udcff",), "broken UTF-8 at character 0"),
    ("reply", (b"a",), "is not text"),
    ("reply", ([{"type": "image"}],), "the message holds an image"),
    ("edit", (3, "a"), "no turn 3; the last one is 0"),
    ("edit", (0, "\ud800"), "broken UTF-8"),
    ("back", (), "one answer only"),
    ("more", (), "is complete"),
]


@pytest.mark.parametrize(("name", "given", "message"), BAD)
def test_a_refused_call_leaves_the_conversation_unchanged(
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

    with pytest.raises(ConfigError, match="no turn yet"):
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
def test_values_out_of_range_are_refused_at_the_start_and_later(wrong: dict[str, object]) -> None:
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
    ["{{ raise_exception('roles') }}", "{{ 'a' * 10000000000000 }}", "{{ messages[7].content }}"],
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


def test_an_error_of_the_model_ends_the_answer_and_not_the_session(generator: Generator) -> None:
    session = Session(generator, RAW, settings=HOT, seed=3, max_answer_tokens=10)
    list(session.reply("a"))
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
