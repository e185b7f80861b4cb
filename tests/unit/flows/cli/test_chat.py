"""`exl2flow chat` without a terminal: pipes, options, profiles, files, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from tiny import make_tiny
from typer.testing import CliRunner, Result

from exl2flow.core.errors import ConfigError
from exl2flow.core.files import lock
from exl2flow.flows.cli.console import printable
from exl2flow.flows.cli.main import app
from exl2flow.flows.cli.options.chat import CHAT, build_chat, of_model, read_profile

DOCS = Path(__file__).parents[4] / "docs"


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
    said = json.loads(run(folder, "--seed", 1, "--json", text="Hello\nthere\n").stdout)

    assert done.exit_code == 0, done.stderr
    assert said["message"] == "Hello\nthere"
    assert said["format"] == "raw"
    assert len(said["tokens"]) == said["statistics"]["answer_tokens"] > 0
    assert done.stdout == printable(said["answer"]).removesuffix("\n") + "\n"
    assert "\x1b" not in done.output
    assert "tokens/s" in done.stderr


def test_missing_model_is_refused_before_an_empty_standard_input(tmp_path: Path) -> None:
    done = run(tmp_path / "nowhere", text="")

    assert done.exit_code == 1
    assert f"`{tmp_path / 'nowhere'}` is no folder" in done.stderr


def test_bad_value_of_a_profile_names_profile_and_file(folder: Path, home: Path) -> None:
    path = profiles(home, '[mine]\ntemperature = "hot"\n')

    wrong = run(folder, "--profile", "mine")
    mine = run(folder, "--profile", "mine", "--top-p", "7")
    given = run(folder, "--profile", "mine", "--temperature", "1", "--top-p", "7")

    assert wrong.exit_code == mine.exit_code == given.exit_code == 2
    assert f"error: profile `mine` in `{path}`: `--temperature` is hot" in wrong.stderr
    assert "error: `--top-p` is 7" in mine.stderr
    assert "error: `--top-p` is 7" in given.stderr


def test_the_same_seed_gives_the_same_answer(folder: Path) -> None:
    first, same, other = (
        json.loads(run(folder, "--json", "--seed", seed).stdout) for seed in (1, 1, 2)
    )

    assert first["tokens"] == same["tokens"] != other["tokens"]
    assert first["seed"] == 1


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


def test_a_pipe_that_fails_leaves_no_message(folder: Path, home: Path) -> None:
    file, template = home / "talk.json", home / "own.jinja"
    template.write_text("{{ raise_exception('no') }}")
    run(folder, "--conversation", file, text="First")

    done = run(folder, "--conversation", file, "--resume", "--format", template, text="Second")

    assert done.exit_code == 1
    assert "First" in file.read_text()
    assert "Second" not in file.read_text()


def test_a_list_of_remembered_profiles_is_refused(folder: Path, home: Path) -> None:
    path = profiles(home, "").with_name("chat.json")
    path.write_text("[]")

    done = run(folder)

    assert done.exit_code == 2
    assert f"error: `{path}` holds no JSON object; delete it" in done.stderr


def test_resuming_nothing_begins_anew_and_says_so(folder: Path) -> None:
    done = run(folder, "--resume")

    assert done.exit_code == 0
    assert "a new one begins" in done.stderr


@pytest.mark.parametrize(
    ("options", "text", "words", "code"),
    [
        ((), "", "standard input is empty", 2),
        (("--format", "chatlm"), "x", "chatml", None),
        (("--temperature", -1), "x", "`--temperature` is -1.0", 2),
        (("--draft", "none"), "x", "none", 1),
        (("--profile", "fast"), "x", "cannot read the profiles", 2),
        (("--remember",), "x", "`--remember` goes with `--profile`", 2),
        (("--json-schema", "none.json"), "x", "cannot read `none.json`", 2),
        (("--reserve", 0), "x", "`--reserve`", 2),
    ],
)
def test_what_is_refused_is_one_message(
    folder: Path, options: tuple[object, ...], text: str, words: str, code: int | None
) -> None:
    done = run(folder, *options, text=text)

    assert done.exit_code == code if code else done.exit_code in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_is_needed() -> None:
    done = CliRunner().invoke(app, ["chat"])

    assert (done.exit_code, "give the folder of a model" in done.stderr) == (2, True)


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
        ("[pirate]\ntemprature = 1", "`temprature`, which is no option of a chat; near are `temp"),
        ("[pirate", "cannot read the profiles"),
    ],
)
def test_a_wrong_profile_is_named(home: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_profile(profiles(home, text), "pirate")


def test_defaults_come_from_the_model_then_from_the_chat(tmp_path: Path) -> None:
    config = {"temperature": 0.3, "typical_p": 0.9, "top_k": -5, "min_p": None, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))

    sampling = build_chat({"top_p": 0.7}, tmp_path).sampling

    assert of_model(tmp_path) == {"temperature": 0.3, "typical": 0.9}
    assert (sampling.temperature, sampling.top_p, sampling.typical) == (0.3, 0.7, 0.9)
    assert (sampling.top_k, sampling.repetition_penalty) == (50, 1.01)
    assert build_chat({"temperature": 1.0}, tmp_path).sampling.temperature == 1.0
    assert build_chat({"greedy": True}, tmp_path).sampling.top_k == 1


def test_a_model_that_does_not_sample_is_greedy_unless_a_temperature_is_given(
    tmp_path: Path,
) -> None:
    config = {"temperature": 0.3, "top_k": 20, "do_sample": False}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))

    assert of_model(tmp_path) == {"temperature": 0.0, "top_k": 20}
    assert build_chat({}, tmp_path).sampling.temperature == 0
    assert build_chat({"temperature": 1.0}, tmp_path).sampling.temperature == 1.0


@pytest.mark.parametrize("text", ["", "[]", "{", '{"temperature": "hot"}'])
def test_a_damaged_recommendation_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)

    assert of_model(tmp_path) == {}


def test_no_option_stands_twice() -> None:
    flags = [row.flag for _, rows in CHAT for row in rows]

    assert len(flags) == len(set(flags))


def test_every_option_stands_in_the_reference() -> None:
    page = (DOCS / "reference" / "cli.md").read_text()

    assert [
        row.flag
        for _, rows in CHAT
        for row in rows
        if f"{row.flag[2:]} " not in page.replace("`", " ")
    ] == []


def test_the_profile_of_the_tutorial_is_one(home: Path, tmp_path: Path) -> None:
    page = (DOCS / "tutorials" / "chat.md").read_text()
    path = profiles(home, page.partition("```toml\n")[2].partition("```")[0])

    config = build_chat(read_profile(path, "pirate"), tmp_path)

    assert (config.chat.system, config.chat.max_answer) == ("You are a pirate.", 300)
    assert config.sampling.temperature == 1.1


def test_every_format_is_listed_with_an_example() -> None:
    from exl2flow.inference.chat import all_formats

    done = CliRunner().invoke(app, ["chat", "--formats"])

    assert done.exit_code == 0
    for name in all_formats():
        assert f"{name}\n" in done.stdout
    assert done.stdout.count("Bye") == len(all_formats())
