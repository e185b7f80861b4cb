"""Saved conversations: the same ids again, other models' files, damaged files."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from chatting import text_of
from tiny import make_tiny

from exl2flow.core.errors import ChatTemplateError, ConfigError, WriteFailed
from exl2flow.engine.chat import Session, all_formats, choose_format
from exl2flow.engine.filters import PrefixFilter
from exl2flow.inference import Generator, SamplingSettings, load_model

RAW = all_formats()["raw"]
HOT = SamplingSettings(temperature=1.5, top_k=0, top_p=0.0, token_bias=((5, -math.inf), (6, 0.5)))


def generator_of(folder: Path, **config: Any) -> Generator:
    folder = make_tiny("llama", folder, max_position_embeddings=512, **config)
    return Generator(load_model(folder, device="cpu"), tokens=512, slots=1)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    return generator_of(tmp_path_factory.mktemp("models") / "one")


@pytest.fixture
def talk(generator: Generator) -> Session:
    """A conversation with all that a file holds."""
    session = Session(
        generator,
        RAW,
        system="Be “good”.",
        settings=HOT,
        seed=3,
        max_answer_tokens=8,
        bans=["zzz"],
        names=("Ada", "Bob"),
        reserve=100,
    )
    for text in ("Hello", "naïve 🙂\n", "three"):
        list(session.reply(text))
    list(session.retry())
    session.turns[0].dropped = True
    return session


def test_a_loaded_conversation_goes_on_with_the_same_ids(talk: Session, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    talk.save(path)
    again = Session.load(path, talk.generator)

    assert again.notes == []
    assert again.turns == talk.turns
    for name in ("system", "settings", "seed", "asked", "bans", "names", "format", "started"):
        assert getattr(again, name) == (
            tuple(talk.bans) if name == "bans" else getattr(talk, name)
        ), name
    for action in (talk, again):
        list(action.more())
        list(action.reply("four"))
        list(action.retry())
    assert again.turns == talk.turns


def test_messages_are_in_the_usual_form(talk: Session, tmp_path: Path) -> None:
    talk.save(tmp_path / "talk.json")

    file = json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))

    messages = file["messages"]
    assert [message["role"] for message in messages[:3]] == ["system", "user", "assistant"]
    assert messages[0] == {"role": "system", "content": "Be “good”."}
    assert messages[1] == {"role": "user", "content": "Hello", "dropped": True}
    assert messages[2]["ids"] == talk.turns[0].ids
    assert messages[2]["content"] == talk.turns[0].answer
    assert len(messages[6]["alternatives"]) == 1
    assert file["settings"]["token_bias"] == [[5, "-Infinity"], [6, 0.5]]
    assert list(tmp_path.iterdir()) == [tmp_path / "talk.json"]


def test_the_formats_system_prompt_stays_the_formats(generator: Generator, tmp_path: Path) -> None:
    for system in (None, ""):
        Session(generator, RAW, system=system).save(tmp_path / "a")
        again = Session.load(tmp_path / "a", generator, names=("Ada", "Bob"))
        assert ("Ada" in again.system) == (system is None)


def test_a_template_is_part_of_the_file(generator: Generator, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    fmt, _ = choose_format(tmp_path, generator.model.tokenizer, str(file))
    session = Session(generator, fmt, seed=1, max_answer_tokens=4)
    list(session.reply("a"))
    session.save(tmp_path / "talk.json")
    file.unlink()

    again = Session.load(tmp_path / "talk.json", generator)

    assert again.format == fmt
    assert again.context_ids("b") == session.context_ids("b")


def test_another_models_file_is_read_as_text_and_says_so(talk: Session, tmp_path: Path) -> None:
    talk.save(tmp_path / "talk.json")
    other = generator_of(tmp_path / "other", seed=1)

    again = Session.load(tmp_path / "talk.json", other)

    assert [(t.user, t.answer, t.dropped) for t in again.turns] == [
        (t.user, t.answer, t.dropped) for t in talk.turns
    ]
    encode = other.model.tokenizer.encode
    assert [turn.ids for turn in again.turns] == [encode(turn.answer) for turn in talk.turns]
    assert len(again.notes) == 1
    assert "is of another model, `one`: its answers are read as text" in again.notes[0]
    assert text_of(again.reply("four")) == again.turns[-1].answer


def test_what_a_file_cannot_hold_is_named(generator: Generator, tmp_path: Path) -> None:
    filters = [PrefixFilter("Yes")]
    Session(generator, RAW, filters=filters).save(tmp_path / "a")

    assert "holds no filters: give them again" in Session.load(tmp_path / "a", generator).notes[0]
    assert Session.load(tmp_path / "a", generator, filters=filters).notes == []


def changed(**values: Any) -> Any:
    return lambda file: {**file, **values}


def message(**values: Any) -> Any:
    return lambda file: {
        **file,
        "messages": [{**m, **values} if m["role"] == "assistant" else m for m in file["messages"]],
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: [], "should be an object"),
        (lambda file: {}, "required"),
        (changed(conversation=2), "conversation"),
        (changed(seed="x"), "seed"),
        (changed(unknown=1), "unknown"),
        (changed(settings={"temperature": -1}), "`temperature` is -1"),
        (changed(settings=7), "settings"),
        (changed(max_answer_tokens=0), "`max_answer_tokens` is 0"),
        (changed(names=["A"]), "names"),
        (changed(messages=[{"role": "user", "content": "a"}]), "must alternate"),
        (changed(messages=[{"role": "tool", "content": "a"}]), "role"),
        (message(ids=[10**9]), "ids that the model does not have"),
        (message(ids=[-1]), "ids that the model does not have"),
        (message(ids="abc"), "ids"),
        (message(content=None), "content"),
        (message(content=[{"type": "image_url"}]), "talk.json` holds an image"),
        (message(image="a.png"), "talk.json` holds an image"),
        (message(first=9999), "ids that the model does not have"),
        (message(drawn=10**7), r"`drawn` is 10000000, but its 7 ids used at most \d+ draws"),
        (message(ids=[5] * 40_000, drawn=10**7 + 1), "40000 ids used at most 10000000 draws"),
    ],
)
def test_a_damaged_file_is_refused(talk: Session, tmp_path: Path, change: Any, reason: str) -> None:
    path = tmp_path / "talk.json"
    talk.save(path)
    path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8")))))

    with pytest.raises(ConfigError, match=reason):
        Session.load(path, talk.generator)


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"{", b"[" * 100_000, b'"a"', b'{"messages": "\\ud800"}', b"\x00"]
)
def test_a_foreign_file_is_refused(generator: Generator, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a").write_bytes(data)

    with pytest.raises(ConfigError, match=r"`.*a` holds no conversation, or a damaged one"):
        Session.load(tmp_path / "a", generator)


def test_a_missing_file_and_a_folder_are_refused(generator: Generator, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        Session.load(tmp_path / "none", generator)
    with pytest.raises(ConfigError, match=r"cannot read .*directory"):
        Session.load(tmp_path, generator)


def test_a_hostile_template_in_a_file_is_an_error(talk: Session, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    talk.save(path)
    file = json.loads(path.read_text(encoding="utf-8"))
    file["format"] |= {"name": "own", "template": "{{ ''.__class__.__mro__ }}"}
    path.write_text(json.dumps(file))
    session = Session.load(path, talk.generator)

    with pytest.raises(ChatTemplateError, match="unsafe"):
        list(session.reply("a"))


def test_a_file_that_cannot_be_written_is_an_error(talk: Session, tmp_path: Path) -> None:
    (tmp_path / "a").touch()

    with pytest.raises(WriteFailed):
        talk.save(tmp_path / "a" / "b")


def test_a_failed_save_leaves_the_file_before(
    talk: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "talk.json"
    talk.save(path)
    before = path.read_bytes()
    list(talk.reply("four"))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteFailed, match="No space left"):
        talk.save(path)

    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
