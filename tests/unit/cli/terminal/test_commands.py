"""The commands of a chat, on a tiny model; what is refused is one line, and the chat goes on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from adapters import make_adapter
from screens import Screen as Terminal
from screens import Script

from exl2flow.cli.terminal.commands import COMMANDS, SETTINGS
from exl2flow.cli.terminal.conversation_file import reserved
from exl2flow.cli.terminal.loop import Chat

Say = Callable[[str], str]


def test_every_command_has_help(say: Say) -> None:
    shown = say("/help")

    for name, command in COMMANDS.items():
        assert name in shown
        assert command.help.endswith(".")
        assert command.help.partition("\n")[0] in say(f"/help {name}")


def test_no_command_is_missing() -> None:
    wanted = "retry back edit undo more system format set lora ban json stats tokens save load"

    assert {*wanted.split(), "help", "clear", "quit"} == {name[1:] for name in COMMANDS}


def test_messages_are_answered_and_the_conversation_is_kept(chat: Chat, say: Say) -> None:
    say("Hello")

    assert len(chat.session.turns[0].ids) > 0
    kept = json.loads(chat.file.read_text())
    assert [m["role"] for m in kept["messages"]] == ["system", "user", "assistant"]


def test_only_a_turn_puts_the_last_conversation_aside(chat: Chat, say: Say) -> None:
    chat.file.write_text("old")

    say("/help")
    before = chat.file.read_text()
    say("Hello")

    assert before == "old"
    assert chat.file.with_suffix(".previous.json").read_text() == "old"
    assert "Hello" in chat.file.read_text()


def test_what_a_command_changes_is_kept(chat: Chat, say: Say) -> None:
    say("Hello")
    say("/system Speak Latin.")
    say("/set temperature 0.5")

    kept = json.loads(chat.file.read_text())
    assert (kept["system"], kept["settings"]["temperature"]) == ("Speak Latin.", 0.5)


@pytest.mark.parametrize("typed", [(" ",), ()], ids=["nothing", "Ctrl-C"])
def test_an_edit_to_nothing_forgets_nothing(typed: tuple[str, ...], chat: Chat, say: Say) -> None:
    say("One")
    say("Two")
    chat.typed = Script(*typed)

    assert "error: nothing was edited" in say("/edit 1")
    assert [turn.user for turn in chat.session.turns] == ["One", "Two"]


def test_retry_and_back_exchange_answers(chat: Chat, say: Say) -> None:
    say("Hello")
    first = chat.session.turns[0].ids

    say("/retry")
    second = chat.session.turns[0].ids
    say("/back")

    assert first != second
    assert chat.session.turns[0].ids == first


@pytest.mark.parametrize(
    ("said", "command"), [(("One", "Two", "Three"), "/edit 2"), (("One", "Two"), "/edit")]
)
def test_edit_replaces_a_turn_and_forgets_later_ones(
    said: tuple[str, ...], command: str, chat: Chat, say: Say
) -> None:
    for text in said:
        say(text)
    chat.typed = script = Script("Zwei")

    say(command)

    assert [turn.user for turn in chat.session.turns] == ["One", "Zwei"]
    assert script.defaults == ["Two"]


def test_more_goes_on_and_undo_takes_back(chat: Chat, say: Say) -> None:
    say("Hello")
    before = chat.session.turns[0].ids[:]

    say("/more")

    assert chat.session.turns[0].ids[: len(before)] == before
    assert len(chat.session.turns[0].ids) > len(before)
    assert "0 turns left" in say("/undo")
    assert chat.session.turns == []


def test_system_and_format_change_what_the_model_reads(chat: Chat, say: Say) -> None:
    assert "Be brief." in say("/system")
    say("/system Speak Latin.")
    assert chat.session.system == "Speak Latin."
    say("/system off")
    assert chat.session.system == ""
    say("/system default")
    assert "conversation" in chat.session.system

    assert "chatml" in say("/format")
    say("/format vicuna")
    assert chat.session.format.name == "vicuna"
    say("/format default")
    assert chat.session.format.name != "vicuna"


@pytest.mark.parametrize(
    ("line", "read", "value"),
    [
        ("temperature 0.5", lambda c: c.session.settings.temperature, 0.5),
        ("top-k=3", lambda c: c.session.settings.top_k, 3),
        ("mirostat on", lambda c: c.session.settings.mirostat, True),
        ("max_answer 7", lambda c: c.session.max_answer_tokens, 7),
        ("amnesia on", lambda c: c.session.amnesia, True),
        ("thinking fold", lambda c: c.screen.thinking, "fold"),
        ("plain yes", lambda c: c.screen.plain, True),
        ("stats on", lambda c: c.screen.stats, True),
    ],
)
def test_set_changes_a_setting(
    chat: Chat, say: Say, line: str, read: Callable[[Chat], object], value: object
) -> None:
    shown = say(f"/set {line}")

    assert read(chat) == value
    assert ("on" if value is True else str(value)) in shown


def test_settings_are_listed(say: Say) -> None:
    shown = say("/set")

    assert "temperature 1.0" in shown
    assert "max_answer 6" in shown
    assert "cfg_scale off" in shown


def test_all_settings_fit_on_a_small_terminal(chat: Chat) -> None:
    small = Terminal(80, 30)
    chat.screen.console = small.console

    chat.take("/set")

    shown = "\n".join(small.screen.display)
    assert [name for name in SETTINGS if f"{name} " not in shown] == []


def test_settings_of_a_narrow_terminal_stand_below_one_another(chat: Chat) -> None:
    narrow = Terminal(24, 60)
    chat.screen.console = narrow.console

    chat.take("/set")

    assert len(narrow.rows()) == len(SETTINGS)


def test_bans_and_schemas_hold_for_the_next_answers(chat: Chat, say: Say, tmp_path: Path) -> None:
    schema = tmp_path / "s.json"
    schema.write_text('{"enum": ["ab", "cd"]}')

    assert "banned: `cd`" in say("/ban cd")
    say(f"/json {schema}")
    say("/set max_answer 40")
    say("Hello")

    assert json.loads(chat.session.turns[-1].answer) == "ab"
    say("/ban off")
    say("/json off")
    assert (chat.session.bans, chat.session.filters) == ((), [])


def test_adapters_are_loaded_and_put_away(chat: Chat, say: Say, tmp_path: Path) -> None:
    made = make_adapter(tmp_path / "an adapter", chat.model)

    assert "1 adapter" in say(f"/lora '{made}'")
    say("Hello")
    assert "0 adapters" in say("/lora off")


def test_statistics_and_tokens_are_counted(chat: Chat, say: Say) -> None:
    say("Hello")

    assert f"answer {len(chat.session.turns[0].ids)} tokens" in say("/stats")
    assert f"{len(chat.session.context_ids('more'))} of" in say("/tokens more")


def test_statistics_before_an_answer_say_that_there_is_none(say: Say) -> None:
    assert say("/stats") == "no answer yet"


def test_statistics_may_follow_each_answer(say: Say) -> None:
    say("/set stats on")

    assert "tokens/s" in say("Hello")


def test_a_saved_conversation_is_loaded(chat: Chat, say: Say, tmp_path: Path) -> None:
    say("Hello")
    ids = chat.session.turns[0].ids
    say(f"/save {tmp_path / 'one.json'}")
    say("/clear")
    assert chat.session.turns == []

    shown = say(f"/load {tmp_path / 'one.json'}")

    assert chat.session.turns[0].ids == ids
    assert "Hello" in shown


def test_save_refuses_the_file_of_another_running_chat(
    chat: Chat, say: Say, tmp_path: Path
) -> None:
    with reserved(tmp_path / "other.json") as other:
        other.write_text("theirs")
        say("Hello")

        assert "error: another chat has" in say(f"/save {other}")
        assert other.read_text() == "theirs"


def test_save_writes_the_file_of_this_chat(chat: Chat, say: Say) -> None:
    assert chat.file is not None
    with reserved(chat.file):
        say("Hello")

        assert say(f"/save {chat.file}").startswith("saved to")


def test_quit_ends_the_chat(chat: Chat) -> None:
    chat.typed = Script("  ", "Hello", "/quit", "never")

    chat.run()

    assert chat.is_over
    assert len(chat.session.turns) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/retyr", "no command `/retyr`; near are `/retry`"),
        ("/", "no command `/`"),
        ("/help nothing", "no command `/nothing`"),
        ("/retry", "no turn"),
        ("/back", "no turn"),
        ("/undo", "no turn"),
        ("/more", "no turn"),
        ("/edit", "no turn"),
        ("/edit 0", "no turn 0"),
        ("/edit x", "no turn x"),
        ("/edit 9", "no turn 9"),
        (f"/edit {'9' * 5000}", "no turn 99999999999999999999; there are 0"),
        ("/load a\0b", "it holds a NUL"),
        ("/save \0", "it holds a NUL"),
        ("/json \0", "it holds a NUL"),
        ("/lora a\0b", "it holds a NUL"),
        ("/amnesia", "`/amnesia` is not a command but a setting: `/set amnesia on`"),
        ("/top-k 3", "`/top-k` is not a command but a setting: `/set top_k VALUE`"),
        ("/nonsense", "no command `/nonsense`; there are `/back`"),
        ("/format chatlm", "chatml"),
        ("/set temperature hot", "`temperature` is hot: input should be a valid number"),
        ("/set temperature -1", "`temperature` is -1; it must be 0 or more"),
        ("/set temprature 1", "no setting `temprature`; near are `temperature`"),
        ("/set max_answer 0", "`max_answer` is 0"),
        ("/set thinking loud", "'show', 'fold' or 'hide'"),
        ("/set mirostat maybe", "`mirostat` is maybe: give on or off"),
        ("/lora nowhere", "nowhere"),
        ("/lora 'open", "No closing quotation"),
        ("/json", "give a file"),
        ("/json none.json", "cannot read `none.json`"),
        ("/save", "give a file"),
        ("/save /proc/none/x.json", "cannot write"),
        ("/save /", "has an empty name"),
        ("/load", "give a file"),
        ("/load none.json", "none.json"),
        ("broken \udcff text", "broken UTF-8"),
    ],
)
def test_a_refused_command_prints_one_line_and_changes_nothing(
    chat: Chat, say: Say, line: str, words: str
) -> None:
    state = (chat.session.settings, chat.session.format, chat.session.max_answer_tokens)

    shown = say(line)

    assert shown.startswith("error: ")
    assert words in shown.replace("\n", "")
    assert "Traceback" not in shown
    assert chat.session.turns == []
    assert state == (chat.session.settings, chat.session.format, chat.session.max_answer_tokens)


def test_damaged_conversations_are_refused_as_one_line(
    chat: Chat, say: Say, tmp_path: Path
) -> None:
    say("Hello")
    for text in ("", "[]", '{"messages": 3}', "\x00\xff"):
        (tmp_path / "damaged.json").write_text(text)

        assert say(f"/load {tmp_path / 'damaged.json'}").startswith("error: ")

    assert len(chat.session.turns) == 1


def test_a_failing_job_ends_the_answer_not_the_chat(
    chat: Chat, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat.session.generator = chat.restart()  # others use the fixture's
    say("Hello")

    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(chat.session.generator._decode, "step", fail)
        patch.setattr(chat.session.generator._prefill, "step", fail)
        shown = say("And now?")

    assert "error: " in shown
    assert len(chat.session.turns) == 1
    say("Again")
    assert len(chat.session.turns) == 2
    assert chat.session.turns[1].ids
