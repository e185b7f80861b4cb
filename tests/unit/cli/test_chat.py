"""`exl2flow chat` without a terminal: pipes, options, profiles, files, and what it refuses."""

import fcntl
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny
from typer.testing import CliRunner, Result

from exl2flow.cli.main import app
from exl2flow.cli.options.chat import build_chat, read_profile
from exl2flow.cli.output.console import printable
from exl2flow.core.errors import ConfigError, InferenceError
from exl2flow.core.store.files import lock

DOCS = Path(__file__).parents[3] / "docs"


LOADING = """
import sys
from exl2flow.cli.commands import chat
from exl2flow.cli.main import app

def loading(text, **_):
    print(text, "torch:", "torch" in sys.modules)
    sys.exit()

sys.stdin.isatty = sys.stdout.isatty = lambda: True
chat.OUT.print = loading
app(["chat", sys.argv[1]])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def run(folder: Path, *options: object, text: str | bytes = "Hello") -> Result:
    words = ["chat", str(folder), "--device", "cpu", "--max-answer", "8", *map(str, options)]
    return CliRunner().invoke(app, words, input=text)


def profiles(home: Path, text: str) -> Path:
    path = home / "config" / "exl2flow" / "chat.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def test_standard_input_is_one_message_and_standard_output_the_answer(folder: Path) -> None:
    done = run(folder, "--seed", 1, "--stats", text="Hello\nthere\n")
    said, other = (
        json.loads(run(folder, "--seed", seed, "--json", text="Hello\nthere\n").stdout)
        for seed in (1, 2)
    )

    assert done.exit_code == 0, done.stderr
    assert said["message"] == "Hello\nthere"
    assert said["format"] == "raw"
    assert len(said["tokens"]) == said["statistics"]["answer_tokens"] > 0
    assert done.stdout == printable(said["answer"]).removesuffix("\n") + "\n"
    assert "\x1b" not in done.output
    assert "tokens/s" in done.stderr
    assert said["seed"] == 1
    assert other["tokens"] != said["tokens"]


def test_bad_value_of_a_profile_names_profile_and_file(folder: Path, home: Path) -> None:
    path = profiles(home, '[mine]\ntemperature = "hot"\n')

    wrong = run(folder, "--profile", "mine")
    mine = run(folder, "--profile", "mine", "--top-p", "7")
    given = run(folder, "--profile", "mine", "--temperature", "1", "--top-p", "7")

    assert wrong.exit_code == mine.exit_code == given.exit_code == 2
    assert f"error: profile `mine` in `{path}`: `--temperature` is hot" in wrong.stderr
    assert "error: `--top-p` is 7" in mine.stderr
    assert "error: `--top-p` is 7" in given.stderr


def test_a_pipe_says_which_option_allows_a_longer_answer(folder: Path) -> None:
    done = run(folder, "--max-answer", 2)

    assert "the answer stops at" in done.stderr
    assert "--max-answer" in done.stderr
    assert re.search("^the answer stops at", done.output, re.MULTILINE)  # on one terminal


def test_resume_goes_on_where_the_last_call_ended(folder: Path, home: Path) -> None:
    file = home / "talk.json"
    run(folder, "--conversation", file, "--seed", 1)

    done = run(folder, "--conversation", file, "--resume", text="More")

    assert done.exit_code == 0, done.stderr
    messages = json.loads(file.read_text())["messages"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["Hello", "More"]


def test_a_resumed_conversation_keeps_its_options_but_for_those_given(
    folder: Path, home: Path
) -> None:
    file = home / "talk.json"
    first = ("--temperature", 0.5, "--top-k", 7, "--system", "Arr.", "--seed", 3)
    run(folder, "--conversation", file, *first)

    run(folder, "--conversation", file, "--resume", "--top-k", 9, text="More")

    kept = json.loads(file.read_text())
    assert kept["settings"]["temperature"] == 0.5
    assert kept["settings"]["top_k"] == 9
    assert kept["seed"] == 3
    assert kept["messages"][0] == {"role": "system", "content": "Arr."}


def test_a_new_conversation_keeps_the_last_one_aside(folder: Path, home: Path) -> None:
    file = home / "talk.json"
    run(folder, "--conversation", file, text="First")
    run(folder, "--conversation", file, text="Second")

    assert "First" in (home / "talk.previous.json").read_text()
    assert "First" not in file.read_text()


def test_nobody_else_can_read_the_folder_of_conversations(folder: Path, home: Path) -> None:
    run(folder, "--resume")

    ours = home / "state" / "exl2flow"
    [file] = (ours / "chats").glob("*.json")
    assert [oct(path.stat().st_mode)[-3:] for path in (ours, file)] == ["700", "600"]


def test_a_file_of_another_chat_is_left_alone(folder: Path, home: Path) -> None:
    file = home / "talk.json"
    run(folder, "--conversation", file, text="First")

    with lock(file):
        done = run(folder, "--conversation", file, "--resume", text="Second")

    assert f"another chat has `{file}`" in done.stderr
    assert "Second" not in file.read_text()
    assert "Second" in (home / "talk-2.json").read_text()


def test_a_file_is_locked_before_it_is_read(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from exl2flow.engine.chat import Session

    file, read = home / "talk.json", Session.load
    run(folder, "--conversation", file, text="First")

    def load(path: Path, *arguments: Any, **options: Any) -> Session:
        with pytest.raises(BlockingIOError):
            lock(file, fcntl.LOCK_NB)
        return read(path, *arguments, **options)

    monkeypatch.setattr(Session, "load", load)

    assert run(folder, "--conversation", file, "--resume", text="Second").exit_code == 0


def test_an_error_after_an_answer_begins_a_line(folder: Path) -> None:
    done = run(folder, "--seed", 1, "--conversation", "/proc/none/x.json")

    assert done.exit_code == 1
    assert done.stdout.endswith("\n")
    assert re.search("^error: cannot write", done.output, re.MULTILINE)


def test_an_answer_that_fails_ends_its_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from exl2flow.cli.terminal.loop import Chat
    from exl2flow.engine.chat import Piece

    def reply(*_: object) -> Iterator[Piece]:
        yield Piece("half an ans")
        raise InferenceError("the answer failed")

    monkeypatch.setattr(Chat, "reply", reply)
    done = run(folder)

    assert (done.exit_code, done.stdout) == (1, "half an ans\n")


def test_nothing_is_written_to_standard_output_before_an_answer_that_fails(
    folder: Path, home: Path
) -> None:
    (home / "own.jinja").write_text("{{ raise_exception('no') }}")

    assert run(folder, "--format", home / "own.jinja").stdout == ""


def test_a_chat_in_the_terminal_says_that_it_loads_before_it_imports_torch(
    folder: Path, home: Path
) -> None:
    kept = profiles(home, "[mine]\ntemperature = 1.0\n").with_name("chat.json")
    kept.write_text(json.dumps({str(folder.resolve()): "mine"}))

    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADING, str(folder)], capture_output=True, text=True
    )

    assert done.stdout.endswith("torch: False\n"), done.stderr


def test_a_pipe_that_fails_leaves_no_message(folder: Path, home: Path) -> None:
    file, template = home / "talk.json", home / "own.jinja"
    template.write_text("{{ raise_exception('no') }}")
    run(folder, "--conversation", file, text="First")

    done = run(folder, "--conversation", file, "--resume", "--format", template, text="Second")

    assert done.exit_code == 1
    assert "First" in file.read_text()
    assert "Second" not in file.read_text()


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("[]", 2, ["error: `{path}` holds no JSON object; delete it"]),
        *(
            (t, 1, ["error: cannot read `{path}`: ", "delete it and"])
            for t in ("{", "\xff", "[" * 100_000)
        ),
    ],
)
def test_damaged_remembered_profiles_are_refused(
    folder: Path, home: Path, text: str, code: int, words: list[str]
) -> None:
    path = profiles(home, "").with_name("chat.json")
    path.write_bytes(text.encode("latin-1"))

    done = run(folder)

    assert done.exit_code == code
    assert all(each.format(path=path) in done.stderr for each in words)


def test_resuming_nothing_begins_anew_and_says_so(folder: Path) -> None:
    done = run(folder, "--resume")

    assert done.exit_code == 0
    assert "a new one begins" in done.stderr


@pytest.mark.parametrize(
    ("options", "text", "words", "code"),
    [
        ((), "", "standard input is empty", 2),
        (("--format", "chatlm"), "x", "chatml", None),
        (("--temperature", -1), "x", "`--temperature` is -1;", 2),
        (("--draft", "missing"), "x", "missing", 1),
        (("--profile", "fast"), "x", "cannot read the profiles", 2),
        (("--remember",), "x", "`--remember` goes with `--profile`", 2),
        (("--json-schema", "none.json"), "x", "cannot read `none.json`", 2),
        (("--reserve", 0), "x", "`--reserve`", 2),
    ],
)
def test_refused_options_print_one_message(
    folder: Path, options: tuple[object, ...], text: str, words: str, code: int | None
) -> None:
    done = run(folder, *options, text=text)

    assert done.exit_code == code if code else done.exit_code in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_is_needed_even_for_an_empty_standard_input(tmp_path: Path) -> None:
    done, missing = CliRunner().invoke(app, ["chat"]), run(tmp_path / "nowhere", text="")

    assert (done.exit_code, "give the folder of a model" in done.stderr) == (2, True)
    assert missing.exit_code == 1
    assert f"`{tmp_path / 'nowhere'}` is not a folder" in missing.stderr


def test_bytes_that_are_not_utf8_are_replaced_and_said(folder: Path) -> None:
    done = run(folder, "--json", text=b"caf\xe9")

    assert json.loads(done.stdout)["message"] == "caf\ufffd"
    assert "not UTF-8 were replaced" in done.stderr


def test_a_profile_is_used_and_remembered(folder: Path, home: Path) -> None:
    profiles(home, '[pirate]\nsystem = "Arr."\nmax-answer = 3\ntemperature = 0.5\n')

    given = run(folder, "--json", "--profile", "pirate", "--remember")
    later = json.loads(run(folder, "--json").stdout)

    assert json.loads(given.stdout)["system"] == later["system"] == "Arr."


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[pirates]", "no profile `pirate`; near are `pirates`"),
        (
            "[pirate]\ntemprature = 1",
            "`temprature`, which is not an option of a chat; near are `temp",
        ),
        ("[pirate", "cannot read the profiles"),
    ],
)
def test_a_wrong_profile_is_named(home: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_profile(profiles(home, text), "pirate")


def test_the_profile_of_the_tutorial_can_be_read(home: Path, tmp_path: Path) -> None:
    page = (DOCS / "tutorials" / "chat.md").read_text()
    path = profiles(home, page.partition("```toml\n")[2].partition("```")[0])

    config = build_chat(read_profile(path, "pirate"), tmp_path)

    assert (config.chat.system, config.chat.max_answer) == ("You are a pirate.", 300)
    assert config.sampling.temperature == 1.1


def test_every_format_is_listed_with_an_example() -> None:
    from exl2flow.engine.chat import all_formats

    done = CliRunner().invoke(app, ["chat", "--formats"])

    assert done.exit_code == 0
    for name in all_formats():
        assert f"{name}\n" in done.stdout
    assert done.stdout.count("Bye") == len(all_formats())
