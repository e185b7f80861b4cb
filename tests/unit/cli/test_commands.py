import re
import resource
import subprocess
import sys
from dataclasses import fields, replace
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from exl2flow.cli.commands import (
    bench,
    convert,
    fits,
    generate,
    inspection,
    measure,
    publish,
    refine,
    sweep,
    validate,
)
from exl2flow.cli.main import app, forbid_cores
from exl2flow.cli.options import Setting, build, settings_of
from exl2flow.core.options.comparison import ComparedModels
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.generation import BenchOptions, GenerationOptions
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.options.validation import ValidateOptions
from exl2flow.pipeline.stages import STAGES

COMMANDS = {
    "convert": (convert.EXAMPLES, (ConversionConfig,)),
    "sweep": (sweep.EXAMPLES, (SweepConfig,)),
    "measure": (measure.EXAMPLES, (MeasureConfig,)),
    "refine": (refine.EXAMPLES, (RefinementConfig,)),
    "fits": (fits.EXAMPLES, ()),
    "inspect": (inspection.EXAMPLES, ()),
    "validate": (validate.EXAMPLES, (ComparedModels, ValidateOptions)),
    "bench": (bench.EXAMPLES, (BenchOptions,)),
    "generate": (generate.EXAMPLES, (GenerationOptions, SamplingSettings)),
    "publish": (publish.EXAMPLES, (PublishConfig,)),
}


def words(text: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return " ".join(plain.replace("│", " ").split())


WITH_RARE_OPTIONS = ("convert", "sweep", "measure", "refine", "validate", "generate")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_options_with_defaults_and_ends_with_examples(command: str) -> None:
    examples, models = COMMANDS[command]

    result = CliRunner().invoke(
        app, [command, "--help-all" if command in WITH_RARE_OPTIONS else "--help"]
    )

    text = words(result.output)
    assert result.exit_code == 0
    assert all(words(example) in text for example in examples)
    for setting in settings(models):
        assert f" {setting.flag} " in text
        assert words(setting.help) in text
        if setting.default is None:
            assert f"{words(setting.help)} [default" not in text
        else:
            assert f"{words(setting.help)} [default: {setting.default}]" in text


@pytest.mark.parametrize("command", WITH_RARE_OPTIONS)
def test_short_help_leaves_out_rare_options_and_says_how_to_see_them(command: str) -> None:
    _, models = COMMANDS[command]

    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})

    text = words(result.output)
    listed = {setting.flag for setting in settings(models) if f" {setting.flag} " in text}
    assert listed == {setting.flag for setting in settings(models) if not setting.is_rare}
    assert " --help-all " in text
    assert len(result.output.splitlines()) <= 105


@pytest.mark.parametrize("command", WITH_RARE_OPTIONS[:-2])
def test_rare_options_are_accepted_though_short_help_hides_them(command: str) -> None:
    result = CliRunner().invoke(app, [command, "nowhere", "--out", "o", "--seed", "many"])

    assert result.exit_code == 2
    assert "`--seed`" in result.stderr


def settings(models: tuple[type, ...]) -> list[Setting]:
    return [setting for model in models for setting in settings_of(model)]


def test_help_of_convert_names_the_stages_in_their_order() -> None:
    text = words(CliRunner().invoke(app, ["convert", "--help"]).output)

    sentence = text.partition("Stages: ")[2].partition(" Each is resumable")[0]
    always, _, sometimes = sentence.partition("; ")
    named = [*always.split(", "), *re.findall(r"\b(?:compose|tune|mtp)\b", sometimes)]
    order = [stage.name for stage in STAGES]
    assert sorted(named) == sorted(order)
    assert named[:-3] == [name for name in order if name not in named[-3:]]


def test_help_of_the_program_lists_commands_and_exit_codes() -> None:
    result = CliRunner().invoke(app, ["--help"])

    text = words(result.output)
    assert result.exit_code == 0
    assert all(command in text for command in COMMANDS)
    assert "130 interrupted" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["convert", "model"],
        ["convert", "model", "--out", "o", "--rows", "many"],
        ["convert", "model", "--out", "o", "--head-bits", "7"],
        ["convert", "model", "--out", "o", "--prefer", "size"],
        ["sweep", "model", "--out", "o", "--bpw", "3", "--prefer", "size"],
        ["convert", "model", "--out", "o", "--bpw", "9"],
        ["convert", "model", "--out", "o", "--bpw", "3", "--bpw-total", "3"],
        ["convert", "model", "--out", "o", "--bpw-total", "3", "--target-bytes", "1000"],
        ["convert", "model", "--out", "o", "--target-bytes", "many"],
        ["convert", "model", "--out", "o", "--quality", "fine"],
        ["convert", "model", "--out", "o", "--sensitivity", "hessian"],
        ["convert", "model", "--out", "o", "--publish", "no-organization"],
        ["convert", "model", "--out", "o", "--publish", "a/b", "--base-model", "c"],
        ["convert", "model", "--out", "o", "--private"],
        ["publish", "model", "--repo", "a/b", "--base-model", "c"],
        ["convert", "model", "--out", "o", "--context", "100"],
        ["convert", "model", "--out", "o", "--cache", "q6"],
        ["sweep", "model", "--out", "o"],
        ["sweep", "model", "--out", "o", "--bpw", "3,four"],
        ["sweep", "model", "--out", "o", "--bpw", "3,9"],
        ["sweep", "model", "--out", "o", "--bpw", ","],
        ["sweep", "model", "--out", "o", "--bpw", "3", "--bpw-total", "3"],
        ["sweep", "model", "--out", "o", "--bpw", "3", "--runner", "slurm"],
        ["sweep", "model", "--out", "o", "--bpw", "3", "--workers", "0"],
        ["sweep", "model", "--out", "o", "--bpw", "3", "--workers", "2", "--no-prefect"],
        ["sweep", "model", "--out", "o", "--bpw", "3", "--runner", "dask", "--no-prefect"],
        ["sweep", "model", "--out", "o", "--bpw", "3", "--max-kl", "1"],
        ["measure", "model", "--out", "measurement.txt"],
        ["validate", "model", "--warn-ratio", "0"],
        ["bench", "model", "--rows", "1,0"],
        ["bench", "model", "--rows", ""],
        ["bench", "model", "--context", "0"],
        ["bench", "model", "--cache", "q5"],
        ["generate", "model", "--prompt", "x", "--top-p", "2"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2_with_a_message(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 2
    assert "rror" in result.stderr
    assert "Value error" not in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--temperature", "-1"),
        ("--top-k", "-3"),
        ("--top-p", "3"),
        ("--min-p", "nan"),
        ("--dry-base", "inf"),
        ("--cache", "q5"),
        ("--device", "gpu"),
    ],
)
def test_options_of_sampling_are_checked_by_name_before_the_model_is_looked_for(
    flag: str, value: str
) -> None:
    result = CliRunner().invoke(app, ["generate", "missing", "--prompt", "x", flag, value])

    assert result.exit_code == 2
    assert flag in result.stderr
    assert "missing" not in result.stderr


def test_every_field_of_sampling_settings_has_an_option_with_its_default() -> None:
    settings = SamplingSettings()

    found = settings_of(SamplingSettings)
    defaults = {setting.field: setting.info.default for setting in found}
    lists = {"token_bias", "dry_breakers", "xtc_ignored"}  # not for a command line
    names = {field.name for field in fields(settings)} - lists
    assert defaults == {name: getattr(settings, name) for name in names}
    assert all(len(setting.help) > 15 for setting in found)
    assert build(SamplingSettings, {}) == settings
    given = build(SamplingSettings, {"top_k": 7, "min_p": 0.1})
    assert given == replace(settings, top_k=7, min_p=0.1)


def test_the_version_needs_neither_torch_nor_prefect() -> None:
    script = (
        "import sys; from exl2flow.cli.main import main; sys.argv = ['exl2flow', '--version']\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'prefect', 'pandas'} & set(sys.modules)))\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )

    assert result.stdout == f"exl2flow {version('exl2flow')}\n[]\n"


def test_a_crash_leaves_no_core() -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))

    try:
        forbid_cores()
        limit, _ = resource.getrlimit(resource.RLIMIT_CORE)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)

    assert limit == 0
