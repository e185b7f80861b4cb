"""A stored conversation: what its file leaves out, and what ids it may have."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import ValidationError

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.conversation import Answer, Conversation, PromptFormat, Turn

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi", "ids": [0, 4], "first": 2, "ended": True},
]


def conversation(**more: object) -> Conversation:
    given = {
        "model": "m",
        "fingerprint": "f",
        "format": PromptFormat(name="own", template="{{ x }}", file=Path("own")),
        "system": None,
        "started": datetime(2026, 1, 1, tzinfo=UTC),
        "seed": 3,
        "settings": SamplingSettings(),
        "max_answer_tokens": 8,
        "reserve": 1,
        "messages": TALK,
    }
    return Conversation.model_validate({**given, **more})


def test_a_turn_without_ids_and_end_is_unanswered() -> None:
    assert Turn("a").is_unanswered is True
    assert Turn("a", Answer(ids=[1])).is_unanswered is False
    assert Turn("a", Answer(ended=True)).is_unanswered is False  # an empty answer


def test_ids_are_below_the_vocabulary_size_and_the_answer_begins_within_them() -> None:
    assert conversation().has_ids_below(5)  # 0 and 4, and the answer begins behind both
    assert not conversation().has_ids_below(4)
    for wrong in ({"first": 3}, {"first": -1}, {"ids": [-1]}):
        assert not conversation(messages=[*TALK[:2], {**TALK[2], **wrong}]).has_ids_below(5)


def test_a_file_leaves_out_what_is_as_by_default(tmp_path: Path) -> None:
    conversation().write(tmp_path / "talk.json")

    stored = json.loads((tmp_path / "talk.json").read_text())
    assert stored["messages"] == TALK
    assert stored["format"]["file"] == "own"
    assert Conversation.read(tmp_path / "talk.json") == conversation()


def test_answers_and_messages_begin_alike() -> None:
    [turn] = conversation(messages=[TALK[1], {"role": "assistant", "content": ""}]).turns

    assert turn.current == Answer()
    assert (turn.current.seed, turn.current.drawn, turn.current.ended) == (0, 0, False)


@pytest.mark.parametrize("name", ["cut", "drawn"])
def test_counts_that_are_stored_begin_at_zero(name: str) -> None:
    conversation(messages=[TALK[1], {**TALK[2], name: 0}])
    with pytest.raises(ValidationError, match=name):
        conversation(messages=[TALK[1], {**TALK[2], name: -1}])


def test_another_model_reads_the_texts_from_their_beginnings() -> None:
    earlier = {"text": "Ho", "ids": [7], "first": 1, "drawn": 3, "seed": 5}
    answer = {**TALK[2], "drawn": 2, "alternatives": [earlier]}
    talk = conversation(messages=[{**TALK[1], "cut": 3}, answer])

    talk.forget_ids(lambda text: [*map(ord, text)])

    [turn] = talk.turns
    assert turn.cut == 0
    assert [(a.ids, a.first, a.drawn) for a in talk.answers] == [
        ([72, 105], 0, 0),
        ([72, 111], 0, 0),
    ]
    assert talk.answers[1].seed == 5


def test_a_file_that_says_nothing_of_it_has_the_usual_options() -> None:
    talk = conversation()

    assert talk.names == ("User", "Assistant")
    assert (talk.amnesia, talk.keep_thinking, talk.bans, talk.left_out) == (False, False, (), ())
    assert not any(turn.dropped for turn in (*talk.turns, Turn("a")))


def test_only_its_owner_reads_a_conversation(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("talk.json")

    conversation().write(tmp_path / "link.json")

    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "talk.json").stat().st_mode & 0o777 == 0o600


def test_special_tokens_of_a_template_are_not_shown() -> None:
    shown = repr(PromptFormat(name="a", template="", file=Path("a"), tokens={"eos": "</s>"}))

    assert "</s>" not in shown


def test_a_damaged_entry_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    conversation().write(path)
    messages = [TALK[1], {**TALK[2], "ids": [1, "x"]}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "messages": messages}))

    with pytest.raises(ConfigError, match=r"damaged one: messages\.1\.ids\.1: "):
        Conversation.read(path)


def test_a_file_that_is_no_object_is_refused_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text("[]")

    with pytest.raises(ConfigError, match="damaged one: the whole: "):
        Conversation.read(tmp_path / "talk.json")


def test_a_missing_file_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read `.*none`: No such file or directory$"):
        Conversation.read(tmp_path / "none")
