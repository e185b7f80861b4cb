"""What a command says where a library of an extra is missing."""

import sys
from pathlib import Path

import pytest
import typer

from exl2flow.cli.output.extras import how_to_install
from exl2flow.cli.output.failures import explained
from exl2flow.cli.work import running
from exl2flow.core.installing import pip


@pytest.mark.parametrize(
    ("module", "extra", "requirement"),
    [
        ("pyarrow", "convert", "pyarrow>=17"),
        ("matplotlib", "convert", "matplotlib>="),
        ("prefect", "prefect", "'prefect<3.9,>=3.8'"),
        ("docket", "prefect", "pydocket>="),
        ("yaml", "prefect", "pyyaml>="),
    ],
)
def test_a_missing_library_is_told_with_what_installs_its_extra(
    module: str, extra: str, requirement: str
) -> None:
    told = how_to_install(module)

    assert told is not None
    assert told.startswith(
        f"`{module}` is missing, which the extra `{extra}` brings: `{pip()} install"
    )
    assert requirement in told


def test_a_library_of_no_extra_is_a_defect() -> None:
    assert how_to_install("no_such_library") is None
    with pytest.raises(ModuleNotFoundError), explained(["inspect"]):
        raise ModuleNotFoundError("no", name="no_such_library")


def test_a_command_whose_extra_is_missing_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as Python marks what is not there

    with pytest.raises(typer.Exit) as left, explained(["convert", "x"]):
        import pyarrow  # noqa: F401  # the import itself is what fails

    assert left.value.exit_code == 1
    assert "error: `pyarrow` is missing" in " ".join(capsys.readouterr().err.split())


def test_a_run_without_prefect_begins_all_the_same_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from exl2flow.cli.main import app

    monkeypatch.setattr(running, "find_spec", lambda name: None)
    app(["convert", str(tmp_path), "--out", str(tmp_path / "o")], standalone_mode=False)

    told = " ".join(capsys.readouterr().err.split())
    assert "running as with `--no-prefect`: `prefect` is missing" in told
    assert "config.json" in told
