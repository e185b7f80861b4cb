"""The tests that `make sanitize` names exist."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
LIST = ROOT / "tests/gpu/sanitized.txt"


def test_every_test_of_the_list_exists() -> None:
    named = LIST.read_text().splitlines()
    files = {name.partition("::")[0] for name in named}

    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    assert set(named) <= set(done.stdout.splitlines())
