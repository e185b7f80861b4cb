"""The chat in a terminal, as a user sees it: on the demo model, with a screen in memory."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from screens import Program

DEMO = Path(__file__).parents[2] / "demo" / "model"
ENTER, ALT_ENTER, CTRL_C, CTRL_D, TAB = "\r", "\x1b\r", "\x03", "\x04", "\t"
Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return what starts a chat whose files are in `tmp_path`; chats left over are killed."""
    programs: list[Program] = []

    def begin(*options: object, width: int = 100, height: int = 40) -> Program:
        command = [sys.executable, "-P", "-m", "exl2flow.flows.cli", "chat", str(DEMO)]
        words = [*command, "--device", "cpu", "--seed", "1", *map(str, options)]
        home = {"XDG_STATE_HOME": str(tmp_path / "s"), "XDG_CONFIG_HOME": str(tmp_path / "c")}
        program = Program(*words, width=width, height=height, **home)
        programs.append(program)
        program.wait("User:")
        return program

    yield begin
    for program in programs:
        with suppress(OSError):
            program.child.close(force=True)


def kept(folder: Path) -> dict:
    [file] = [p for p in (folder / "s/exl2flow/chats").glob("*.json") if "previous" not in p.name]
    return json.loads(file.read_text())


def users(folder: Path) -> list[str]:
    return [m["content"] for m in kept(folder)["messages"] if m["role"] == "user"]


def test_a_conversation_in_the_terminal(start: Start, tmp_path: Path) -> None:
    chat = start("--max-answer", 20, "--stats", "--draft", DEMO)

    chat.enter("Hello there")
    chat.wait("tokens/s")
    chat.type("two", ALT_ENTER, "lines", ENTER)
    chat.wait("tokens/s", count=2)
    chat.enter('"""three')
    chat.type("more", ENTER, 'lines"""', ENTER)
    chat.wait("tokens/s", count=3)
    chat.type("\x1b[200~pasted\r\n/quit\x1b[201~", ENTER)
    chat.wait("tokens/s", count=4)
    shown = chat.enter("/tokens") or chat.wait("of 2048 tokens")

    assert users(tmp_path) == ["Hello there", "two\nlines", "three\nmore\nlines", "pasted\n/quit"]
    assert shown.startswith("loading ")
    assert "draft tokens accepted" in " ".join(shown.split())  # wherever the line is wrapped
    assert "\ufffd" not in shown
    assert chat.leave(CTRL_D) == 0


@pytest.mark.slow
def test_every_command_in_the_terminal(start: Start, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"enum": ["ab"]}')
    chat = start("--max-answer", 12, height=70)

    def enter(text: str, words: str, count: int = 1) -> None:
        chat.enter(text)
        chat.wait(words, count=count)

    stopped = "`/more` goes on"
    enter("Hello", stopped)
    enter("/help", "Ctrl-D: leave")
    enter("/retry", stopped, 2)
    enter("/back", "User:", 5)
    enter("/more", stopped, 3)
    enter("/stats", "answer 12 tokens")
    enter("/tokens", "of 2048 tokens")
    enter("/set temperature 0.5", "temperature 0.5")
    enter("/system Be brief.", "Be brief.", 2)
    enter("/format chatml", "format `chatml`, as requested")
    enter("/format raw", "format `raw`, as requested")
    enter("/ban zebra", "banned: `zebra`")
    enter("/lora off", "0 adapters")
    enter(f"/json {tmp_path / 'schema.json'}", "answers match the schema")
    enter("Give me that", '"ab"')
    enter("/json off", "answers are free")
    enter(f"/save {tmp_path / 'one.json'}", "saved to")
    enter("/undo", "1 turn left")
    enter("/clear", "the conversation is empty")
    enter("/retry", "error: no turn")
    enter(f"/load {tmp_path / 'one.json'}", "2 turns")
    chat.type("/ed", TAB)
    chat.wait("User: /edit")
    chat.type(" 1", ENTER)
    chat.wait("User: Hello", count=2)
    chat.enter(" again")
    chat.enter("/quit")

    assert chat.leave() == 0
    assert users(tmp_path) == ["Hello again"]


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_keeps_it_then_leaves(start: Start, tmp_path: Path) -> None:
    chat = start("--max-answer", 1500)
    chat.enter("Tell me a long story")
    chat.wait("Assistant:", count=2)  # the model plays both parts

    chat.type(CTRL_C)
    chat.wait("stopped\n`/more` goes on")
    chat.wait("User:", count=2)
    answer = kept(tmp_path)["messages"][-1]
    chat.type(CTRL_C)
    chat.wait("press Ctrl-C again")

    assert chat.leave(CTRL_C) == 0
    assert 0 < len(answer["ids"]) < 1500
    assert "^C" not in "\n".join(chat.rows())


@pytest.mark.slow
def test_resizing_during_an_answer_loses_nothing(start: Start, tmp_path: Path) -> None:
    chat = start("--ban", "User:")
    chat.enter("Tell me a long story")
    chat.wait("Assistant:")

    for width, height in ((60, 40), (110, 50), (40, 60)):
        chat.resize(width, height)
        chat.read(0.1)
    chat.wait("User:", count=2)

    rows = chat.rows()
    answer = kept(tmp_path)["messages"][-1]["content"].split()
    assert rows[0].startswith("loading")
    assert rows[1].startswith(str(DEMO)[:30])
    assert answer[-3:] == "\n".join(rows).rpartition("User:")[0].split()[-3:]
    assert chat.leave(CTRL_D) == 0


def test_a_killed_chat_is_resumed(start: Start, tmp_path: Path) -> None:
    chat = start("--max-answer", 1500)
    chat.enter("/set max_answer 8")
    chat.wait("max_answer 8", count=2)
    chat.enter("First")
    chat.wait("`/more` goes on")
    chat.enter("/set max_answer 1500")
    chat.wait("max_answer 1500", count=2)
    chat.enter("Second")
    chat.wait("Second")
    chat.wait("Assistant:", count=2)

    chat.child.kill(signal.SIGKILL)
    chat.leave()
    before = users(tmp_path)
    again = start("--resume", "--max-answer", "8", "--ngram")
    again.wait("User: Second\nno answer yet: `/retry` answers")
    again.enter("/retry")
    again.wait("`/more` goes on")

    assert again.leave(CTRL_D) == 0
    assert before == users(tmp_path) == ["First", "Second"]
    assert kept(tmp_path)["messages"][-1]["ids"]
