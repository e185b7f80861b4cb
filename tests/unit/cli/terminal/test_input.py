"""What is typed: several lines, pastes, quotes, completion, and leaving."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from exl2flow.cli.terminal.commands import COMMANDS
from exl2flow.cli.terminal.input import Leave, Typed, _Words

ENTER, ALT_ENTER, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"
WORDS = {name[1:]: command.words for name, command in COMMANDS.items()}


def paste(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe:
        yield pipe


def typed(keys: PipeInput, history: Path | None = None, hints: list[str] | None = None) -> Typed:
    say = [].append if hints is None else hints.append
    return Typed("User", WORDS, history, say=say, source=keys, out=DummyOutput())


@pytest.mark.parametrize(
    ("pressed", "text"),
    [
        (f"Hello{ENTER}", "Hello"),
        (f"one{ALT_ENTER}two{ENTER}", "one\ntwo"),
        (f'"""one{ENTER}two{ENTER}"""{ENTER}', "one\ntwo"),
        (f'"""one{ENTER}{ENTER}two"""{ENTER}', "one\n\ntwo"),
        (paste("a\r\nb\rc") + ENTER, "a\nb\nc"),
        (paste("/quit\nx") + f" y{ENTER}", "/quit\nx y"),
        (f"half{CTRL_C}whole{ENTER}", "whole"),
        (f"{CTRL_C}x{CTRL_C}{CTRL_C}ok{ENTER}", "ok"),
    ],
)
def test_keys_become_a_message(keys: PipeInput, pressed: str, text: str) -> None:
    keys.send_text(pressed)

    assert typed(keys).read() == text


@pytest.mark.parametrize("pressed", [CTRL_D, CTRL_C + CTRL_C])
def test_ctrl_d_or_ctrl_c_twice_on_an_empty_line_leaves(keys: PipeInput, pressed: str) -> None:
    keys.send_text(pressed)

    with pytest.raises(Leave):
        typed(keys).read()


def test_the_first_ctrl_c_says_how_to_leave(keys: PipeInput) -> None:
    hints: list[str] = []
    keys.send_text(f"{CTRL_C}{CTRL_D}")

    with pytest.raises(Leave):
        typed(keys, hints=hints).read()

    assert hints == ["press Ctrl-C again to leave, or Ctrl-D"]


def test_bytes_of_a_paste_that_are_not_utf8_are_replaced(keys: PipeInput, tmp_path: Path) -> None:
    keys.send_bytes(b"\x1b[200~caf\xe9 \xff\x1b[201~ ok\r")

    text = typed(keys, tmp_path / "history").read()

    assert text == "caf\ufffd \ufffd ok"


def test_history_outlives_the_program(keys: PipeInput, tmp_path: Path) -> None:
    file = tmp_path / "state" / "history"
    keys.send_text(f"first{ALT_ENTER}line{ENTER}")
    typed(keys, file).read()

    keys.send_text(f"{UP}{ENTER}")

    assert typed(keys, file).read() == "first\nline"


def test_a_history_that_cannot_be_written_is_forgotten(keys: PipeInput) -> None:
    keys.send_text(f"Hello{ENTER}")

    assert typed(keys, Path("/proc/none/history")).read() == "Hello"


def test_an_edit_begins_with_the_earlier_text(keys: PipeInput) -> None:
    keys.send_text(f" more{ENTER}")

    assert typed(keys).read(default="some") == "some more"


@pytest.mark.parametrize("pressed", [CTRL_C, f" more{CTRL_C}"])
def test_ctrl_c_leaves_an_edit(keys: PipeInput, pressed: str) -> None:
    keys.send_text(pressed)

    with pytest.raises(Leave):
        typed(keys).read(default="some")


def test_ctrl_d_leaves_an_edit_on_an_empty_line_only(keys: PipeInput) -> None:
    to_begin, rubout = "\x01", "\x0b"
    keys.send_text(f"{CTRL_D}{to_begin}{CTRL_D}{ENTER}{to_begin}{rubout}{CTRL_D}")
    user = typed(keys)

    assert user.read(default="some") == "ome"  # it deletes what is under the cursor
    with pytest.raises(Leave):
        user.read(default="some")


def test_nobody_else_can_read_what_was_typed(keys: PipeInput, tmp_path: Path) -> None:
    file = tmp_path / "state" / "history"

    typed(keys, file)

    assert [oct(path.stat().st_mode)[-3:] for path in (file.parent, file)] == ["700", "600"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/re", ["retry"]),
        ("/sa", ["save"]),
        ("re", []),
        ("/help und", ["undo"]),
        ("/set temperature_", ["temperature_last"]),
        ("/format chat", ["chatml"]),
        ("/undo ", []),
        ("/nothing x", []),
    ],
)
def test_commands_and_their_words_are_completed(text: str, found: list[str]) -> None:
    completions = _Words(WORDS).get_completions(Document(text), CompleteEvent())

    assert [each.text for each in completions] == found


def test_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "talk.json").touch()

    completions = _Words(WORDS).get_completions(Document(f"/load {tmp_path}/ta"), CompleteEvent())

    assert [each.text for each in completions] == ["lk.json"]
