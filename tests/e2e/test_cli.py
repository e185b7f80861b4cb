"""The command line on a tiny model, without Prefect."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny import make_tiny
from typer.testing import CliRunner, Result

from exl2flow.cli.main import app

SHORT_ROWS = ("--row-tokens", "64", "--measure-row-tokens", "64")
CALIBRATION = ("--rows", "2", "--measure-rows", "1", *SHORT_ROWS, "--quality", "fast")
EVALUATION = ("--validate-rows", "1", "--validate-row-tokens", "64", "--sample-tokens", "4")
VALIDATION = (*EVALUATION, "--fail-ratio", "100")
QUICK = (*CALIBRATION, *VALIDATION, "--no-prefect", "--device", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A tiny source, its measurement, the model made from both, and what `--json` said."""

    source: Path
    measurement: Path
    out: Path
    said: dict


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in arguments])


def refused(*arguments: object, code: int = 1) -> str:
    """Run a command that must fail by a message, and return the message."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    assert "error: " in result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    root = tmp_path_factory.mktemp("cli")
    source = make_tiny("llama", root / "source")
    measured = run("measure", source, "--out", root, *CALIBRATION)
    assert measured.exit_code == 0, measured.output
    measurement, out = root / "measurement.json", root / "out"
    made = ["--bpw", 4, "--measurement", measurement, "--json"]
    result = run("convert", source, "--out", out, *QUICK, *made)
    assert result.exit_code == 0, result.output
    return Converted(
        source=source, measurement=measurement, out=out, said=json.loads(result.stdout)
    )


def test_convert_says_in_json_what_it_made(converted: Converted) -> None:
    said = converted.said

    assert said["plan"]["out"] == said["model"] == str(converted.out)
    assert 3.99 < said["bpw"] <= 4.0
    assert 0 < said["score"]["kl_divergence"] < 1
    assert said["score"]["perplexity"] > 1
    assert said["source_bytes"] > said["score"]["bytes"] > 0
    assert [layer["name"] for layer in said["layers"]][-1] == "lm_head"
    assert said["sample"].startswith("One morning")
    assert Path(said["report_folder"], "report.md").is_file()


def test_a_repeated_convert_reports_the_same_for_people(converted: Converted) -> None:
    made = ["--bpw", 4, "--measurement", converted.measurement]

    result = run("convert", converted.source, "--out", converted.out, *QUICK, *made)

    assert result.exit_code == 0
    assert f"{converted.said['score']['kl_divergence']:.5f}" in result.stdout
    assert f"model   {converted.out}" in result.stdout
    assert "quantize 1/1 cached" in result.stderr


def test_a_dry_run_prints_the_plan_and_does_nothing(converted: Converted, tmp_path: Path) -> None:
    result = run("convert", converted.source, "--out", tmp_path / "o", *QUICK, "--dry-run")

    assert result.exit_code == 0
    assert "4bpw (decoder's reachable bpw:" in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_restart_forgets_only_this_configuration(converted: Converted, tmp_path: Path) -> None:
    root = ["measure", converted.source, "--work-root", tmp_path / "w", *CALIBRATION]
    assert run(*root, "--out", tmp_path / "a.json").exit_code == 0
    (other,) = (tmp_path / "w").glob("*/measure/*")
    sibling = other.with_name("sibling")
    sibling.mkdir()

    result = run(*root, "--out", tmp_path / "b.json", "--restart")

    assert "measure 5/5" in result.stderr
    assert "cached" not in result.stderr
    assert sibling.is_dir()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_inspect_agrees_with_what_quantize_reported(converted: Converted) -> None:
    result = run("inspect", converted.out, "--json")

    contents = json.loads(result.stdout)
    found = [*contents["layers"], *contents["others"]]
    reported = converted.said["layers"]
    assert [(p["name"], p["bpw"], p["rel_err"]) for p in found] == [
        (layer["name"], layer["bpw"], layer["rel_err"]) for layer in reported
    ]
    assert contents["bpw"] <= 4.0
    assert contents["file_bytes"] == converted.said["score"]["bytes"]


@pytest.mark.parametrize("option", [(), ("--matrices",)], ids=["sublayers", "matrices"])
def test_inspect_prints_every_name_uncut(converted: Converted, option: Sequence[str]) -> None:
    result = run("inspect", converted.out, *option)

    assert result.exit_code == 0
    assert ("0.self_attn.q_proj" if option else "1.mlp ") in result.stdout
    assert "…" not in result.stdout


def test_validate_prints_one_json_object_per_model(converted: Converted) -> None:
    few = ["--rows", 1, "--row-tokens", 64]
    reference = ["--reference", converted.source]

    result = run("validate", converted.out, converted.source, *reference, *few, "--json")

    made, itself = map(json.loads, result.stdout.splitlines())
    assert result.exit_code == 0
    for key in ("perplexity", "kl_divergence", "top1_agreement", "tokens", "bytes"):
        assert made[key] == converted.said["score"][key]
    assert made["reference_perplexity"] == itself["perplexity"]
    assert (itself["kl_divergence"], itself["top1_agreement"]) == (0, 1)


def test_validate_needs_no_reference(converted: Converted) -> None:
    result = run("validate", converted.out, "--rows", 1, "--row-tokens", 64)

    assert result.exit_code == 0
    assert f"{converted.said['score']['perplexity']:.4f}" in result.stdout


def test_validate_warns_and_fails_by_ratio(converted: Converted) -> None:
    few = ["--reference", converted.source, "--rows", 1, "--row-tokens", 64]

    warned = run("validate", converted.out, *few, "--warn-ratio", 0.5)
    message = refused("validate", converted.out, *few, "--fail-ratio", 0.5)

    assert warned.exit_code == 0
    assert "above 0.5 x" in warned.stderr
    assert "above 0.5 x" in message


def test_convert_fails_after_its_report_when_the_verdict_does(
    converted: Converted, tmp_path: Path
) -> None:
    made = ["--bpw", 4, "--measurement", converted.measurement, "--fail-ratio", 0.5]

    result = run("convert", converted.source, "--out", converted.out, *QUICK, *made)

    assert result.exit_code == 1
    assert "KL divergence" in result.stdout
    assert "above 0.5 x" in result.stderr


def test_generate_with_a_seed_repeats_itself(converted: Converted) -> None:
    request = ["generate", converted.out, "--prompt", "The quick", "--max-new-tokens", 8]

    first, second, other = (run(*request, "--seed", seed, "--json") for seed in (1, 1, 2))

    texts = [json.loads(result.stdout)["text"] for result in (first, second, other)]
    assert texts[0] == texts[1] != texts[2]


def test_generate_prints_prompt_and_text_and_its_speed(converted: Converted) -> None:
    request = ["generate", converted.out, "--prompt", "The quick", "--max-new-tokens", 4]

    result = run(*request, "--greedy")

    assert result.stdout.startswith("The quick")
    assert "tokens/s" in result.stderr


def test_a_prompt_beyond_the_models_positions_is_refused(converted: Converted) -> None:
    request = ["generate", converted.out, "--prompt", "x", "--max-new-tokens", 400]

    assert "256 positions" in refused(*request)


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")


def test_impossible_conversions_are_refused(converted: Converted, tmp_path: Path) -> None:
    convert = ["convert", converted.source, *QUICK]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "precious.txt").write_text("mine")

    assert "is not a folder" in refused("convert", tmp_path / "no", "--out", tmp_path / "o", *QUICK)
    assert "out of reach" in refused(*convert, "--out", tmp_path / "o", "--bpw", 2.5)
    assert "`--out`" in refused(*convert, "--out", foreign)
    missing = ("--calibration", "no.parquet")
    assert "no such file" in refused(*convert, "--out", tmp_path / "o", *missing)
    assert list(foreign.iterdir()) == [foreign / "precious.txt"]


def test_all_problems_come_in_one_list(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "source")
    drop_tensor(source)
    (source / "tokenizer.json").unlink()

    said = refused("convert", source, "--out", source.parent, *QUICK, "--bpw", 2.5, "--dry-run")

    for part in ("problems:", "model.norm.weight", "tokenizer.model", "out of reach", "`--out`"):
        assert part in said


def test_files_that_are_not_what_they_should_be_are_refused(
    converted: Converted, tmp_path: Path
) -> None:
    convert = ["convert", converted.source, "--out", tmp_path / "o", *QUICK]
    other = make_tiny("llama", tmp_path / "other", hidden_size=96, head_dim=24)
    text = tmp_path / "text.parquet"
    text.write_text("not parquet")

    assert "text.parquet" in refused(*convert, "--measurement", text)
    assert "another model" in refused(
        "convert", other, *convert[2:], "--measurement", converted.measurement
    )


@pytest.mark.slow
def test_a_signal_commits_and_the_printed_command_goes_on(
    converted: Converted, tmp_path: Path
) -> None:
    out = tmp_path / "signal test.json"
    arguments = ["measure", str(converted.source), "--out", str(out), *CALIBRATION]
    program = "from exl2flow.cli.main import main; main()"
    command = [sys.executable, "-c", program, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as the other one was measured
    lines = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if line.startswith("measure 0/"):
                process.send_signal(signal.SIGTERM)
        code = process.wait()
        watchdog.cancel()

    assert code == 143, lines
    assert "after 1 of 5; everything finished is saved" in lines[-3]
    assert lines[-2] == "resume with:"
    words = shlex.split(lines[-1])
    assert words == ["exl2flow", *arguments]
    resumed = run(*words[1:])
    assert resumed.exit_code == 0
    assert "measure 1/5\n" in resumed.stderr
    assert json.loads(out.read_text()) == json.loads(converted.measurement.read_text())
