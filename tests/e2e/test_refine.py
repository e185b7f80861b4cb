"""`exl2flow refine` on a tiny model, as a user calls it, and its flow on a real server."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
from prefect_runs import artifacts, run_name, run_state, task_states
from refinements import disguise, refinement, rough_model
from stage_runs import text_parquet
from tiny import make_tiny
from typer.testing import CliRunner, Result

from exl2flow.cli.main import app
from exl2flow.cli.options import settings_of
from exl2flow.core.options.refine import RefinementConfig

SHORT = ("--row-tokens", "64", "--measure-rows", "1", "--measure-row-tokens", "64")
EVALUATION = ("--validate-rows", "1", "--validate-row-tokens", "64", "--sample-tokens", "4")
QUICK = (
    "--rows",
    "8",
    *SHORT,
    *EVALUATION,
    "--fail-ratio",
    "100",
    "--device",
    "cpu",
    "--no-prefect",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refined:
    """A source, a rough model of it, the refined one, the command, and what `--json` said."""

    source: Path
    model: Path
    out: Path
    arguments: tuple[object, ...]
    said: dict


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in arguments])


@pytest.fixture(scope="module")
def refined(tmp_path_factory: pytest.TempPathFactory) -> Refined:
    root = tmp_path_factory.mktemp("refine")
    source, model = rough_model(root, "llama", num_hidden_layers=1)
    disguise(model)
    text = text_parquet(root / "text.parquet")
    paths = (model, "--reference", source, "--out", root / "out")
    arguments = ("refine", *paths, "--calibration", text, *QUICK)
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    return Refined(source=source, model=model, out=root / "out", arguments=arguments, said=said)


def test_refined_model_is_nearer_at_the_same_size(refined: Refined) -> None:
    rows = ("--rows", 1, "--row-tokens", 64, "--fail-ratio", 100)

    result = run(
        "validate", refined.model, refined.out, "--reference", refined.source, *rows, "--json"
    )

    old, new = map(json.loads, result.stdout.splitlines())
    assert new["bytes"] == old["bytes"]
    assert new["kl_divergence"] < old["kl_divergence"]
    assert new["kl_divergence"] == refined.said["score"]["kl_divergence"]
    judgement = refined.said["refinement"]
    assert judgement["refined"] is True
    assert judgement["kl_after"] < judgement["kl_before"]


def test_refined_model_generates(refined: Refined) -> None:
    result = run("generate", refined.out, "--prompt", "The quick", "--max-new-tokens", 4, "--json")

    assert result.exit_code == 0
    assert json.loads(result.stdout)["prompt"] == "The quick"


def test_a_repeated_command_is_cached_and_says_the_same_for_people(refined: Refined) -> None:
    result = run(*refined.arguments)

    judgement = refined.said["refinement"]
    assert result.exit_code == 0
    assert "refine 1/1 cached" in result.stderr
    assert f"KL divergence on {judgement['rows']} held-out rows" in result.stdout
    assert f"{judgement['kl_before']:.5f} -> {judgement['kl_after']:.5f}, refined" in result.stdout
    assert f"model   {refined.out}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("{source}", "--out", "{new}"), 1, "holds no EXL2 matrices"),
        (("{model}", "--out", "{model}"), 2, "`--out` is the model that is refined"),
        (("{model}", "--out", "{new}", "--rounds", "0"), 2, "`--rounds` is 0"),
        (("{nowhere}", "--out", "{new}"), 1, "nowhere"),
    ],
)
def test_bad_input_is_refused_in_words(
    arguments: tuple[str, ...], code: int, message: str, refined: Refined, tmp_path: Path
) -> None:
    places = {"source": refined.source, "model": refined.model}
    places |= {"new": tmp_path / "new", "nowhere": tmp_path / "nowhere"}
    words = [word.format(**places) for word in arguments]

    result = run("refine", *words, "--reference", refined.source, *QUICK)

    assert result.exit_code == code, result.output
    assert "error: " in result.stderr
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "new").exists()


def test_another_reference_is_refused(refined: Refined, tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "other", num_hidden_layers=1, vocab_size=320)

    result = run("refine", refined.model, "--reference", other, "--out", tmp_path / "o", *QUICK)

    assert result.exit_code == 2
    assert "give the model that it was made from" in " ".join(result.stderr.split())


def test_help_all_names_what_stays_and_all_options() -> None:
    result = run("refine", "--help-all")

    text = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 0
    assert "the size is the same to the byte" in text
    assert all(f" {setting.flag} " in text for setting in settings_of(RefinementConfig))


def test_a_dry_run_prints_the_plan_and_makes_nothing(refined: Refined, tmp_path: Path) -> None:
    arguments = (refined.model, "--reference", refined.source, "--out", tmp_path / "o", *QUICK)

    people, program = (
        run("refine", *arguments, "--dry-run"),
        run("refine", *arguments, "--dry-run", "--json"),
    )

    assert people.exit_code == program.exit_code == 0
    assert "of which 4 are set aside to judge" in people.stdout
    assert json.loads(program.stdout)["plan"]["out"] == str(tmp_path / "o")
    assert not list(tmp_path.iterdir())


def test_a_failed_verdict_comes_after_the_report(refined: Refined) -> None:
    result = run(*refined.arguments, "--fail-ratio", "0.5")

    assert result.exit_code == 1
    assert "KL divergence" in result.stdout
    assert "above 0.5 x" in result.stderr


@pytest.fixture(scope="module")
def flow_run(
    refined: Refined,
    prefect_env: Mapping[str, str],
    single_thread: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, UUID]:
    """Refine by the flow as a deployment would; return the output's folder and the run."""
    from exl2flow.flows import refine

    out = tmp_path_factory.mktemp("refine-flow") / "out"
    config = refinement(refined.source, refined.model, out)
    parameters = {"config": config.model_dump(mode="json")}
    state = refine(**parameters, return_state=True)
    run_id = state.state_details.flow_run_id
    assert state.is_completed(), state
    assert run_id is not None
    return out, run_id


STAGES = ("tokenize", "sensitivity", "refine", "judge", "compile", "validate")


def test_the_run_has_a_task_per_stage_and_makes_the_model(flow_run: tuple[Path, UUID]) -> None:
    out, run_id = flow_run

    assert run_name(run_id) == "source@refined:rough"
    assert task_states(run_id) == dict.fromkeys(STAGES, "Completed")
    assert list(out.glob("*.safetensors"))


def test_the_page_of_the_run_shows_progress_judgement_and_report(
    flow_run: tuple[Path, UUID],
) -> None:
    found = artifacts(flow_run[1])

    assert found["source-refine"].data == 100.0
    assert "held-out rows" in str(found["source-judgement"].data)
    assert "data:image/svg+xml;base64," in str(found["source-report"].data)


@pytest.mark.slow
def test_the_command_runs_the_flow_on_the_configured_server(
    refined: Refined, prefect_env: Mapping[str, str], tmp_path: Path
) -> None:
    words = [str(word) for word in refined.arguments if word != "--no-prefect"]

    made = subprocess.run(
        [sys.executable, "-m", "exl2flow.flows.cli", *words, "--json"],
        env={**os.environ, **prefect_env},
        capture_output=True,
        text=True,
    )

    assert made.returncode == 0, made.stderr
    assert "this run in the Prefect UI: " in made.stderr
    assert json.loads(made.stdout)["refinement"] == refined.said["refinement"]
    assert "refine 1/1 cached" in made.stderr


def test_a_reference_of_another_model_fails_the_run(
    refined: Refined, prefect_env: Mapping[str, str], tmp_path: Path
) -> None:
    from exl2flow.flows import refine

    other = make_tiny("llama", tmp_path / "other", num_hidden_layers=1, vocab_size=320)

    state = refine(refinement(other, refined.model, tmp_path / "out"), return_state=True)

    assert state.is_failed()
    assert run_state(state.state_details.flow_run_id) == "Failed"
    assert not (tmp_path / "out").exists()
