"""What a user types to change the libraries beside this program, whoever installed it."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

OF_PIPX = "pipx_metadata.json"  # in the environments of `pipx install`
OF_A_VENV = "pyvenv.cfg"  # in which uv writes its version


def pip() -> str:
    """Return how a shell calls pip for this environment.

    The environments of uv have no pip; those of `uv tool` and pipx are never activated.
    """
    folder = Path(sys.prefix)
    if (folder / OF_PIPX).exists():
        return f"pipx runpip {shlex.quote(folder.name)}"
    if find_spec("pip") is None and _is_of_uv(folder / OF_A_VENV):
        return f"UV_PYTHON={shlex.quote(str(folder))} uv pip"
    found = shutil.which("pip")
    if found is not None and Path(found).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


def _is_of_uv(settings: Path) -> bool:
    if not settings.exists():
        return False
    return any(line.startswith("uv ") for line in settings.read_text("utf-8").splitlines())


def install(wanted: Sequence[str]) -> str:
    """Return the command that installs distributions."""
    return f"{pip()} install {shlex.join(wanted)}"


def reinstall(wanted: str) -> str:
    """Return the command that installs a distribution although it is there."""
    return f"{pip()} install --force-reinstall {shlex.quote(wanted)}"


def replace(found: Sequence[str], wanted: str) -> str:
    """Return the command that installs a distribution in place of others."""
    return f"{pip()} uninstall -y {shlex.join(found)} && {install([wanted])}"
