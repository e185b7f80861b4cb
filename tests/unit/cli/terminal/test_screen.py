"""How a chat shows answers, thoughts and notes, and how Ctrl-C ends them."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from screens import Screen as Terminal

from exl2flow.cli.terminal.loop import Chat
from exl2flow.cli.terminal.screen import Screen
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.engine.chat import Piece
from exl2flow.inference import Event

Say = Callable[[str], str]


def test_a_second_ctrl_c_ends_the_answer_at_once_not_the_chat(
    chat: Chat, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat.session.generator = chat.restart()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat.session.generator._decode, "step", interrupt)
        shown = say("Hello")

    assert "stopped at once" in shown
    say("Again")
    assert chat.session.turns[-1].ids


def test_ctrl_c_closes_the_answer_and_keeps_its_text(chat: Chat, terminal: Terminal) -> None:
    def pieces() -> Iterator[Piece]:
        nonlocal is_closed
        try:
            yield Piece("some ")
            os.kill(os.getpid(), signal.SIGINT)
            yield Piece("text")
            yield Piece("never shown")
        finally:
            is_closed = True

    is_closed = False
    chat.answer(pieces())

    assert is_closed
    assert "some text" in terminal.rows()
    assert "stopped" in terminal.rows()


def test_ctrl_c_is_heard_while_an_answer_has_no_text(
    chat: Chat, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = chat.session.generator = chat.restart()
    special = SamplingSettings(token_bias=((0, 1e4),))
    chat.session.settings, chat.session.max_answer_tokens = special, 100
    step, steps = generator.step, list[None]()

    def interrupted() -> list[Event]:
        steps.append(None)
        if len(steps) == interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(generator, "step", interrupted)
    interrupt_at = 1  # while the prompt is read
    chat.take("Hello")
    turns = len(chat.session.turns)
    steps.clear()
    interrupt_at = 5  # while tokens come
    chat.take("Hello")

    assert turns == 0
    assert len(steps) < 9
    assert [turn.current.ended for turn in chat.session.turns] == [False]
    assert 0 < len(chat.session.turns[0].ids) < 9
    assert sum(row == "stopped" for row in terminal.rows()) == 2


def test_an_answer_at_the_cap_says_how_the_terminal_goes_on(chat: Chat, terminal: Terminal) -> None:
    chat.session.settings, chat.session.max_answer_tokens = SamplingSettings.greedy(), 2

    chat.take("Hello")
    rows = terminal.rows()

    assert rows[-2:] == ["the answer stops at 2 tokens", "`/more` goes on, `/retry` answers anew"]


@pytest.mark.parametrize(
    ("mode", "shown"), [("show", ["hm, hm"]), ("fold", ["thinking …", "thought for"]), ("hide", [])]
)
def test_thoughts_are_shown_folded_or_hidden(
    chat: Chat, terminal: Terminal, mode: str, shown: list[str]
) -> None:
    chat.screen.thinking = mode
    pieces = [
        Piece("hm, ", "thinking"),
        Piece("hm", "thinking"),
        Piece("# Yes"),
        Piece("no", "note"),
    ]

    chat.answer(iter(pieces))

    rows = terminal.rows()[1:]  # below the name
    assert len(rows) == len(shown) + 2
    assert all(row.startswith(words) for row, words in zip(rows, shown, strict=False))
    assert [row.strip() for row in rows[-2:]] == ["Yes", "no"]


def test_lines_are_wrapped_at_spaces() -> None:
    narrow = Terminal(20, 10)

    Screen(narrow.console).say("the first words of a line, then others")

    assert narrow.rows() == ["the first words of a", "line, then others"]


def test_only_the_log_format_names_the_model(chat: Chat, say: Say) -> None:
    assert "Assistant:" in say("Hello")
    say("/format chatml")

    assert "Assistant:" not in say("Hello")


def test_escape_sequences_of_thoughts_names_and_files_do_not_reach_the_terminal(
    chat: Chat, say: Say, terminal: Terminal
) -> None:
    chat.answer(iter([Piece("a\x1b[2Jb", "thinking"), Piece("\x1b]0;x\x07", "note")]))
    say("/ban \x1b[2J")
    say("/load \x1b[2J")
    chat.screen.plain = True
    chat.answer(iter([Piece("c\x1b[2Jd")]))

    assert "\x1b[2J" not in terminal.written
    assert "\x1b]0" not in terminal.written
