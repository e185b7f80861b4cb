"""What to type follows from who made the environment."""

import os
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from exl2flow.core import installing
from exl2flow.core.installing import install, pip, reinstall, replace


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an environment without pip, which is not activated."""
    folder = tmp_path / "exl2flow"
    (folder / "bin").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python"))
    monkeypatch.setattr(installing, "find_spec", lambda name: None)
    return folder


def test_pipx_is_asked_for_its_own_environments(environment: Path) -> None:
    (environment / "pipx_metadata.json").write_text("{}")

    assert install(["scipy>=1.15"]) == "pipx runpip exl2flow install 'scipy>=1.15'"


def test_uv_is_asked_where_it_made_the_environment(environment: Path) -> None:
    (environment / "pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.13.9\n")

    assert reinstall("torch>=2.11") == (
        f"UV_PYTHON={environment} uv pip install --force-reinstall 'torch>=2.11'"
    )


def test_elsewhere_the_program_s_own_python_is_named(environment: Path) -> None:
    (environment / "pyvenv.cfg").write_text("home = /usr/bin\n")

    assert pip() == f"{environment}/bin/python -m pip"


def test_pip_of_an_activated_environment_is_enough(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = environment / "bin" / "pip"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    assert replace(["cupy-cuda12x", "cupy-cuda13x"], "cupy-cuda13x>=14") == (
        "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'cupy-cuda13x>=14'"
    )


def test_what_is_typed_runs_in_a_shell() -> None:
    done = subprocess.run(
        f"{pip()} --version", shell=True, capture_output=True, text=True, timeout=60, check=True
    )

    assert util.find_spec("pip") is None or sys.prefix in done.stdout
    assert shutil.which(pip().split()[0]) or pip().startswith("UV_PYTHON=")
