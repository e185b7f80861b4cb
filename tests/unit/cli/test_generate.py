"""`exl2flow generate`: one prompt, files of prompts, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter, merged
from tiny import make_tiny
from typer.testing import CliRunner, Result

from exl2flow.cli.main import app
from exl2flow.engine.generate.device_slots import DeviceSlots


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")


def run(folder: Path, *options: object) -> Result:
    words = ["generate", str(folder), "--device", "cpu", *map(str, options)]
    return CliRunner().invoke(app, words)


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_answers_to_a_file_of_prompts_are_those_to_each(folder: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": "The quick", "tag": "a"},
        {"prompt": [5, 6], "max_new_tokens": 3, "seed": 9},
    ]
    source = written(tmp_path / "prompts.jsonl", *lines)

    options = ("--max-new-tokens", 6, "--seed", 4, "--ignore-eos")
    done = run(folder, "--prompts", source, "--out", tmp_path / "answers.jsonl", *options)

    assert done.exit_code == 0, done.stderr
    texts = (tmp_path / "answers.jsonl").read_text().splitlines()
    answers = {answer["index"]: answer for answer in map(json.loads, texts)}
    alone = json.loads(run(folder, "--prompt", "The quick", "--json", *options).stdout)
    assert answers[0] == {
        "index": 0,
        "tag": "a",
        "prompt": "The quick",
        "text": alone["text"],
        "reason": "max_new_tokens",
        "seed": 4,
    }
    assert answers[1]["seed"] == 9
    assert "2 prompts, 9 tokens, 0 failed" in done.stderr


def test_options_reach_the_request(folder: Path) -> None:
    options = ("--prompt", "The quick", "--json", "--greedy", "--ignore-eos")
    options = (*options, "--max-new-tokens", 24)
    plain = json.loads(run(folder, *options).stdout)
    stop = plain["text"][4:6]

    stopped = json.loads(run(folder, *options, "--stop", stop).stdout)
    banned = json.loads(run(folder, *options, "--ban", stop).stdout)

    assert stopped["reason"] == "stop_string"
    assert stopped["text"] == plain["text"][: plain["text"].index(stop)]
    assert stop.lower() not in banned["text"].lower()


def test_a_negative_prompt_steers_the_text(folder: Path) -> None:
    options = ("--prompt", "The quick", "--json", "--max-new-tokens", 12, "--seed", 1)
    pair = ("--negative-prompt", "A dog", "--cfg-scale")

    plain, same, steered = (
        json.loads(run(folder, *options, *more).stdout)["text"]
        for more in ((), (*pair, 1), (*pair, 3))
    )

    assert plain == same != steered


def test_a_pair_in_a_file_is_a_prompt_and_a_negative_one(folder: Path, tmp_path: Path) -> None:
    source = written(tmp_path / "p.jsonl", {"prompt": ["The quick", "A dog"]})
    options = ("--max-new-tokens", 12, "--seed", 1, "--cfg-scale", 3, "--tokens", 1024)

    of_file = json.loads(run(folder, "--prompts", source, *options).stdout)
    plain = run(folder, "--prompt", "The quick", "--negative-prompt", "A dog", "--json", *options)

    assert of_file["text"] == json.loads(plain.stdout)["text"]
    assert of_file["prompt"] == ["The quick", "A dog"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "either `--prompt` or `--prompts`"),
        (("--prompt", "x", "--out", "o"), "`--out` goes with `--prompts`"),
        (("--prompt", "x", "--negative-prompt", "y"), "`cfg_scale` is not set"),
        (("--prompt", "x", "--max-new-tokens", 100_000), "100000 new ones exceed"),
        (
            ("--prompt", "x", "--tokens", 1, "--max-tokens", 900, "--max-new-tokens", 300),
            "cache has 1",
        ),
        (("--prompt", "x", "--min-new-tokens", 300), "`min_new_tokens` is 300"),
        (("--prompt", ""), "no tokens"),
    ],
)
def test_impossible_requests_print_one_message(
    folder: Path, options: tuple[object, ...], words: str
) -> None:
    done = run(folder, *options, "--no-bos")

    assert done.exit_code in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refused_prompt_is_not_printed_before_the_error(folder: Path) -> None:
    done = run(folder, "--prompt", "The quick", "--max-new-tokens", 100_000)

    assert (done.exit_code, done.stdout) == (1, "")


def test_an_error_behind_a_prompt_begins_on_its_own_line(folder: Path, failing: None) -> None:
    done = run(folder, "--prompt", "The quick", "--ignore-eos", "--seed", 1)

    assert done.exit_code == 1
    assert done.stdout.startswith("The quick")
    assert done.stdout.endswith("\n")
    assert "error: the GPU has no more memory" in done.stderr


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fourth decode step of the process be the last one."""
    forward, counts = DeviceSlots.forward, [0]

    def broken(*given: Any, **named: Any) -> None:
        counts[0] += 1
        if counts[0] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        forward(*given, **named)

    monkeypatch.setattr(DeviceSlots, "forward", broken)


@pytest.mark.timeout(30)
def test_a_failure_of_the_device_ends_a_file_of_prompts_and_keeps_its_answers(
    folder: Path, tmp_path: Path, failing: None
) -> None:
    source = written(tmp_path / "p.jsonl", {"prompt": "x", "max_new_tokens": 2}, {"prompt": "y"})
    out = tmp_path / "answers.jsonl"

    done = run(folder, "--prompts", source, "--out", out, "--ignore-eos", "--max-new-tokens", 9)

    assert done.exit_code == 1
    assert "error: the GPU has no more memory" in done.stderr
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["reason"] for answer in answers] == ["max_new_tokens", "error"]
    assert "Tried to allocate" in answers[1]["error"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_only_a_newline_ends_a_line_of_prompts(
    folder: Path, tmp_path: Path, separator: str
) -> None:
    prompt, source = f"a{separator}b", tmp_path / "prompts.jsonl"
    line = json.dumps({"prompt": prompt, "max_new_tokens": 1}, ensure_ascii=False)
    source.write_bytes(f"{line}\r\n\r\n{line}".encode())

    done = run(folder, "--prompts", source)

    assert done.exit_code == 0, done.stderr
    answers = done.stdout.strip("\n").split("\n")
    assert [json.loads(answer)["prompt"] for answer in answers] == [prompt] * 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "x"', "line 2 of"),
        ('["x"]', "not an object with a `prompt`"),
        ('{"prompt": "x", "temprature": 1}', "has `temprature`"),
        ('{"prompt": "x", "tag": {"image": 1}, "y": 2}', "has `y`"),
        ('{"prompt": "x", "image": "a.png"}', "holds an image"),
        ('{"messages": [{"content": [{"type": "image_url"}]}]}', "holds an image"),
        ('{"prompt": "x", "max_new_tokens": "many"}', "line 2 of"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(
    folder: Path, tmp_path: Path, line: str, words: str
) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "good"}\n' + line + "\n")

    done = run(folder, "--prompts", source)

    assert done.exit_code == 2
    assert words in done.stderr


def test_a_prompt_that_fails_stops_no_other(folder: Path, tmp_path: Path) -> None:
    source = written(tmp_path / "p.jsonl", {"prompt": []}, {"prompt": "x"}, {"prompt": [5] * 5000})

    done = run(folder, "--prompts", source, "--max-new-tokens", 3, "--ignore-eos")

    answers = {a["index"]: a for a in map(json.loads, done.stdout.splitlines())}
    assert [answers[i]["reason"] for i in range(3)] == ["error", "max_new_tokens", "error"]
    assert "no tokens" in answers[0]["error"]
    assert "5000 prompt tokens" in answers[2]["error"]
    assert "3 prompts, 3 tokens, 2 failed" in done.stderr


def test_answers_escape_control_characters_and_stay_exact(folder: Path, tmp_path: Path) -> None:
    hostile = "\x1b[2J\x7f\x9b2J"
    source = written(tmp_path / "p.jsonl", {"prompt": hostile, "tag": hostile})

    done = run(folder, "--prompts", source, "--max-new-tokens", 1)

    (line,) = done.stdout.splitlines()
    assert not re.search("[\x00-\x1f\x7f-\x9f]", line)
    answer = json.loads(line)
    assert (answer["prompt"], answer["tag"]) == (hostile, hostile)


def test_answers_match_their_schema_expression_and_grammar(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"enum": ["yes", "no"]}')
    (tmp_path / "sum.lark").write_text('start: /[0-9]{1,3}/ "+" /[0-9]{1,3}/')

    def answer(*options: object) -> str:
        found = run(folder, "--prompt", "Well: ", "--json", "--seed", 1, *options)
        assert found.exit_code == 0, found.stderr
        return json.loads(found.stdout)["text"]

    assert answer("--json-schema", tmp_path / "schema.json").strip() in ('"yes"', '"no"')
    assert json.loads(answer("--json-schema", '{"enum": [17]}')) == 17
    assert re.fullmatch("[xyz]{5}", answer("--regex", "[xyz]{5}"))
    assert re.fullmatch(r"\d{1,3}\+\d{1,3}", answer("--grammar", tmp_path / "sum.lark"))


@pytest.mark.parametrize(
    ("options", "words", "code"),
    [
        (("--json-schema", "none.json"), "cannot read `none.json`", 2),
        (("--json-schema", '{"type": "objec"}'), "`json_schema` of a filter is broken", 2),
        (("--regex", "[0-9"), "unclosed character class", 2),
        (("--regex", "a", "--json-schema", "{}"), "no token is left", 1),  # no JSON text is an `a`
    ],
)
def test_a_filter_that_is_broken_or_a_dead_end_is_one_message(
    folder: Path, options: tuple[str], words: str, code: int
) -> None:
    done = run(folder, "--prompt", "a", *options)

    assert (done.exit_code, words in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_adapters_change_the_model_for_all_prompts(folder: Path, tmp_path: Path) -> None:
    one, two = (make_adapter(tmp_path / name, folder, seed=i) for i, name in enumerate("ab"))
    both = merged(tmp_path / "both", folder, one, two)
    options = ("--prompt", "The quick", "--json", "--greedy", "--ignore-eos", "--max-new-tokens", 9)

    plain, adapted, expected = (
        json.loads(run(model, *options, *more).stdout)["text"]
        for model, more in ((folder, ()), (folder, ("--lora", one, "--lora", two)), (both, ()))
    )

    assert plain != adapted == expected
    refused = run(folder, *options, "--lora", tmp_path)
    assert (refused.exit_code, "adapter_config.json" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu-split", "auto"), "a model is split among GPUs, and the device is `cpu`"),
        (("--devices", "0,1"), "a model is split among GPUs, and the device is `cpu`"),
        (("--gpu-split", "20;24"), "`--gpu-split 20;24` is not a list such as `20,24` in GB"),
        (("--gpu-split", "20", "--reserve", "1"), "`--reserve` goes with `--gpu-split auto`"),
        (("--devices", "1,1"), "`--devices 1,1` names a device twice"),
        (("--tensor-parallel", "few"), "`--tensor-parallel few` is neither a number of GPUs nor"),
        (("--tensor-parallel", "0"), "`--tensor-parallel 0` is neither a number of GPUs nor"),
        (("--tensor-parallel", "all"), "on CPUs `tensor_parallel` is a number of processes"),
        (("--tensor-parallel", "2", "--reserve", "0"), "are two ways; give one"),
        (("--tensor-parallel", "3", "--devices", "0,1"), "but `--devices` names 2"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "bench"])
def test_impossible_splits_are_refused(
    command: str, folder: Path, options: tuple[str, ...], message: str
) -> None:
    prompt = ("--prompt", "a") if command == "generate" else ()
    words = [command, str(folder), "--device", "cpu", *prompt, *options]

    done = CliRunner().invoke(app, words)

    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_prompts_are_kept_on_disk_until_they_are_cleared(folder: Path, tmp_path: Path) -> None:
    kept, prompt = tmp_path / "pages", "3.14 " * 200
    words = ("--prompt", prompt, "--max-new-tokens", 4, "--max-tokens", 2048, "--greedy")
    plain = run(folder, *words)

    first = run(folder, *words, "--cache-disk", kept)
    files = {path: path.stat().st_ino for path in kept.rglob("*.page")}
    again = run(folder, *words, "--cache-disk", kept, "--cache-ram", "1MB")
    assert {path: path.stat().st_ino for path in kept.rglob("*.page")} == files
    cleared = run(folder, *words, "--cache-disk", kept, "--cache-disk-size", 0, "--clear-cache")

    assert plain.exit_code == 0, plain.stderr
    assert plain.stdout == first.stdout == again.stdout == cleared.stdout
    assert len(files) >= 2
    assert f"`{kept}` keeps prompts and answers" in " ".join(first.stderr.split())
    assert not [*kept.rglob("*.page")]


def test_a_folder_of_something_else_is_not_cleared(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")

    other = run(folder, "--prompt", "a", "--cache-disk", tmp_path, "--clear-cache")
    without = run(folder, "--prompt", "a", "--clear-cache")

    assert (other.exit_code, without.exit_code) == (2, 2)
    assert "holds other things" in other.stderr
    assert "`--clear-cache` goes with `--cache-disk`" in without.stderr
    assert (tmp_path / "thesis.tex").is_file()
