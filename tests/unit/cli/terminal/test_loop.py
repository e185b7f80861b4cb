"""Where a chat keeps its conversation: before answers, beside other chats, after `/load`."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from screens import Screen as Terminal
from screens import Script

from exl2flow.cli.terminal.conversation_file import reserved
from exl2flow.cli.terminal.loop import Chat
from exl2flow.core.errors import InferenceError
from exl2flow.engine.chat import Piece, Session
from exl2flow.inference import Generator

Say = Callable[[str], str]


def users(path: Path) -> list[str]:
    messages = json.loads(path.read_text())["messages"]
    return [message["content"] for message in messages if message["role"] == "user"]


def kept(folder: Path) -> dict[str, list[str]]:
    return {path.name: users(path) for path in folder.glob("*.json")}


def beside(chat: Chat, **changes: object) -> Chat:
    """Return a chat with a conversation of its own, in the same file unless another is given."""
    own = Session(chat.session.generator, chat.session.format, seed=2, max_answer_tokens=6)
    return replace(chat, **{"session": own, "is_kept": False, **changes})


def resumed(chat: Chat, generator: Generator) -> Chat:
    """Return a chat that goes on with the file of a killed one."""
    assert chat.file is not None
    file = chat.file.rename(chat.file.with_stem("killed"))
    return replace(chat, file=file, session=Session.load(file, generator), is_kept=True)


def seen_while_answering(chat: Chat, monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    """Type a line, and return the messages in the file when the answer begins."""
    found: list[str] = []

    def pieces(self: Session, *_: object, **__: object) -> Iterator[Piece]:
        assert chat.file is not None
        found.extend(users(chat.file))
        raise InferenceError("no answer")
        yield Piece("")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_pieces", pieces)
        chat.take(line)
    return found


def test_a_message_is_in_the_file_before_its_answer(
    chat: Chat, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    say("One")

    assert seen_while_answering(chat, monkeypatch, "Two") == ["One", "Two"]
    assert chat.file is not None
    assert users(chat.file) == ["One"]


@pytest.mark.parametrize("line", ["/edit 1", "/edit 2", "/retry"])
def test_answers_stay_in_the_file_until_what_replaces_them_ends(
    chat: Chat, say: Say, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    say("One")
    say("Two")
    assert chat.file is not None
    before, chat.typed = chat.file.read_bytes(), Script("New")

    seen = seen_while_answering(chat, monkeypatch, line)

    assert seen == ["One", "Two"]
    assert json.loads(chat.file.read_bytes()) == json.loads(before)


def test_an_edited_message_without_an_answer_is_in_the_file_before_its_answer(
    chat: Chat, say: Say, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    say("One")
    assert list(chat.reply("Two")) != []  # and killed before it was written
    again = resumed(chat, generator)
    again.typed = Script("Zwei")

    assert seen_while_answering(again, monkeypatch, "/edit") == ["One", "Zwei"]


def test_a_value_error_of_a_command_is_one_line(chat: Chat, say: Say) -> None:
    def obey(*_: object) -> None:
        raise ValueError("not a value")

    chat.obey = obey

    assert say("/set x") == "error: `/set x`: not a value"


def test_a_value_error_of_an_answer_is_a_defect(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(chat.screen, "show", answer)

    with pytest.raises(ValueError, match="a defect"):
        chat.take("Hello")


@pytest.mark.parametrize("line", ["/retry", "/more"])
def test_a_resumed_message_without_an_answer_is_answered(
    chat: Chat, say: Say, generator: Generator, terminal: Terminal, line: str
) -> None:
    say("One")
    assert list(chat.reply("Two")) != []  # and killed before it was written
    assert chat.file is not None
    again = resumed(chat, generator)

    again.recall()
    again.take(line)

    assert "User: Two\nno answer yet: `/retry` answers" in "\n".join(terminal.rows())
    assert [turn.user for turn in again.session.turns] == ["One", "Two"]
    assert again.session.turns[1].current == chat.session.turns[1].current
    assert again.session.turns[1].alternatives == []


def test_a_resumed_turn_is_shown_with_both_names(chat: Chat, say: Say, terminal: Terminal) -> None:
    say("One")
    before = len(terminal.rows())

    chat.recall()

    assert terminal.rows()[before + 1 :][:3] == ["1 turn", "User: One", "Assistant:"]


def test_load_puts_the_kept_conversation_aside(chat: Chat, say: Say, tmp_path: Path) -> None:
    say("Other")
    say(f"/save {tmp_path / 'other'}")
    say("Precious")

    say(f"/load {tmp_path / 'other'}")
    say("More")
    say(f"/load {tmp_path / 'other'}")

    assert kept(tmp_path) == {
        "kept.json": ["Other"],
        "kept.previous.json": ["Other", "Precious"],
        "kept.previous-2.json": ["Other", "More"],
    }


def test_clear_puts_the_conversation_aside_with_the_next_message(
    chat: Chat, say: Say, tmp_path: Path
) -> None:
    say("One")
    say("/clear")
    before = kept(tmp_path)
    say("Two")

    assert before == {"kept.json": ["One"]}
    assert kept(tmp_path) == {"kept.json": ["Two"], "kept.previous.json": ["One"]}


def test_an_empty_conversation_displaces_none_that_was_put_aside(
    chat: Chat, say: Say, tmp_path: Path
) -> None:
    say("One")
    say("/clear")
    say("Two")
    say("/undo")
    say("/clear")
    say("Three")

    assert kept(tmp_path) == {"kept.json": ["Three"], "kept.previous.json": ["One"]}


def test_conversations_put_aside_by_several_chats_never_replace_one_another(
    chat: Chat, tmp_path: Path
) -> None:
    for text in ("One", "Two", "Three", "Four"):
        beside(chat, file=tmp_path / "own.json").take(text)

    assert kept(tmp_path) == {
        "own.json": ["Four"],
        "own.previous.json": ["One"],
        "own.previous-2.json": ["Two"],
        "own.previous-3.json": ["Three"],
    }


def test_conversations_are_private_unless_their_file_is_not(chat: Chat, say: Say) -> None:
    assert chat.file is not None
    modes = []
    for mode in (0o600, 0o640):
        say("Hello")
        modes.append(oct(chat.file.stat().st_mode)[-3:])
        chat.file.chmod(mode)
    say("Hello")

    assert [*modes, oct(chat.file.stat().st_mode)[-3:]] == ["600", "600", "640"]


def test_a_link_to_a_conversation_stays(chat: Chat, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real.json")

    with reserved(link) as file:
        beside(chat, file=file).take("Hello")

    assert link.is_symlink()
    assert users(tmp_path / "real.json") == ["Hello"]


def test_a_folder_that_cannot_be_written_costs_one_line(chat: Chat, terminal: Terminal) -> None:
    other = beside(chat, file=Path("/proc/none/x.json"))

    other.take("Hello")

    assert "\n".join(terminal.rows()).count("error: cannot write") == 1
    assert other.session.turns[0].ids
