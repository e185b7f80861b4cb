"""Importing this lets a process and its children import the package from a bare checkout."""

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("exl2flow.core") is not None
    except ModuleNotFoundError:
        return False


def _use_checkout() -> None:
    """Make the package importable from here, as if it were installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = Path(tempfile.mkdtemp(prefix="exl2flow-metadata-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    info = folder / f"exl2flow-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: exl2flow\nVersion: {project['version']}\n"
    )
    paths = [str(ROOT / ".links"), str(folder)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])


if not _is_installed():
    _use_checkout()
