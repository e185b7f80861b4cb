"""`exl2flow refine` on a tiny model, as a user calls it."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from refinements import disguise, rough_model
from stage_runs import text_parquet
from tiny import make_tiny
from typer.testing import CliRunner, Result

from exl2flow.flows.cli.main import app
from exl2flow.flows.cli.options.table import CALIBRATION, QUALITY, RUNNING, VALIDATION

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
    for _, settings in (QUALITY, CALIBRATION, VALIDATION, RUNNING):
        assert all(f" {setting.flag} " in text for setting in settings)
