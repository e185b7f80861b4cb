"""`make demo` installs the extra for the GPU that the driver supports."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = """\
| NVIDIA-SMI {driver}        Driver Version: {driver}        {words}: {cuda}     |
|-----------------------------------------+------------------------+---------------|
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile ECC  |
"""


def installed_extras(folder: Path, told: str | None, *words: str) -> list[str]:
    """Return the extras that `make demo` would install where `nvidia-smi` prints this."""
    if told is not None:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'X'\n{told}\nX\n")
        program.chmod(0o755)
    done = subprocess.run(
        ["make", "--always-make", "--dry-run", "demo", *words],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert any("exl2flow convert demo/model" in line for line in lines)
    return [line.split(".[")[1].rstrip("]'") for line in lines if " -e '.[" in line]


@pytest.mark.parametrize(
    ("cuda", "words", "extras"),
    [
        ("13.0", "CUDA Version", ["convert,prefect", "cuda13"]),
        ("13.2", "CUDA UMD Version", ["convert,prefect", "cuda13"]),
        ("14.0", "CUDA Version", ["convert,prefect", "cuda13"]),
        ("12.4", "CUDA Version", ["convert,prefect", "cuda12"]),
        ("11.8", "CUDA Version", ["convert,prefect"]),
        ("N/A", "CUDA Version", ["convert,prefect"]),
    ],
)
def test_the_extra_is_that_of_the_driver(
    cuda: str, words: str, extras: list[str], tmp_path: Path
) -> None:
    told = HEADER.format(driver="580.95.05", cuda=cuda, words=words)

    assert installed_extras(tmp_path, told) == extras


def test_a_driver_that_does_not_answer_brings_no_extra(tmp_path: Path) -> None:
    assert installed_extras(tmp_path, "NVIDIA-SMI has failed") == ["convert,prefect"]


@pytest.mark.parametrize(
    ("given", "extras"),
    [("cuda12", ["convert,prefect", "cuda12"]), ("none", ["convert,prefect"])],
)
def test_a_choice_replaces_what_the_driver_says(
    given: str, extras: list[str], tmp_path: Path
) -> None:
    told = HEADER.format(driver="580.95.05", cuda="13.0", words="CUDA Version")

    assert installed_extras(tmp_path, told, f"CUDA={given}") == extras
