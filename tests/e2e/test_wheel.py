"""The built wheel, installed without the checkout: it runs and converts with what it carries."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from tiny import make_tiny

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("build", "dist", "demo-exl2", "*.egg-info", "__pycache__", ".*")
CODE = ["core", "kernels", "model", "quant", "engine", "inference", "pipeline", "tasks", "flows"]
CODE += ["cli", "compat", "calibration_data", "serve"]
PAGES = ["index.html", "page.css", "page.js", "store.js", "markdown.js"]
PAGES += ["markdown-it.umd.min.js", "markdown-it.LICENSE"]
SHIPPED = (".py", ".cu", ".cuh", ".j2", ".jinja", ".toml")
LEAST_SETUPTOOLS = 77  # as `pyproject.toml` asks for
TIMEOUT_SECONDS = 300
WHERE = """
import json
from importlib.util import find_spec
names = "core.options.config kernels.cuda model.files.exl2 quant.rounding.hessian".split()
names += ["engine", "pipeline.stages", "tasks.stage", "flows.cli", "cli.main"]
names += ["inference", "compat", "calibration_data", "serve.http.app"]
print(json.dumps([find_spec(f"exl2flow.{name}").origin for name in names]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment that holds the wheel and sees the dependencies of this one."""

    home: Path
    outside: Path

    def run(self, program: str, *arguments: str) -> str:
        """Run a program of the environment outside the checkout and return its stdout."""
        inherited = {name: v for name, v in os.environ.items() if not name.startswith("PYTHON")}
        result = subprocess.run(
            [str(self.home / "bin" / program), *arguments],
            cwd=self.outside,
            env={**inherited, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout


def run_here(*arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert result.returncode == 0, result.stdout + result.stderr


def isolation() -> list[str]:
    """Return the option that saves fetching setuptools, if the one that is here will do."""
    try:
        found = int(version("setuptools").partition(".")[0])
    except PackageNotFoundError:
        return []
    return ["--no-isolation"] if found >= LEAST_SETUPTOOLS else []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist of a copy of the tree, so that the checkout stays clean."""
    root = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, root / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT))
    run_here("build", *isolation(), "--outdir", str(root), str(root / "tree"))
    (path,) = root.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel installed; the packages of this environment are found, its editable links are not.

    Python follows `.pth` files in its own site folder only, and an editable install is one.
    """
    home = tmp_path_factory.mktemp("environment")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(home)
    python = str(home / "bin" / "python")
    run_here(
        "pip",
        "--python",
        python,
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        str(wheel),
    )
    (site,) = home.glob("lib/python*/site-packages")
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(dependencies)))
    return Environment(home=home, outside=tmp_path_factory.mktemp("outside"))


def test_wheel_holds_the_code_and_its_data_and_nothing_else(wheel: Path) -> None:
    expected = {
        f"exl2flow/{path.relative_to(ROOT)}"
        for folder in CODE
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED or path.name == "py.typed"
    }
    expected |= {"exl2flow/__init__.py", "exl2flow/py.typed"}
    data = {f"exl2flow/calibration_data/{name}.parquet" for name in ("chat", "standard", "heldout")}
    data |= {"exl2flow/calibration_data/PROVENANCE.md", "exl2flow/flows/server/prefect.yaml"}
    data |= {"exl2flow/flows/server/automations.yaml"}
    data |= {f"exl2flow/serve/http/pages/{name}" for name in PAGES}

    names = set(zipfile.ZipFile(wheel).namelist())

    described = {name for name in names if ".dist-info/" in name}
    assert names - described == expected | data
    assert {Path(name).name for name in described} >= {"METADATA", "LICENSE", "entry_points.txt"}


def test_wheel_does_not_carry_the_demo_model(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel).infolist()

    assert not [
        file.filename for file in files if re.search("demo|tests|safetensors", file.filename)
    ]
    assert wheel.stat().st_size < 4 * 2**20


def test_version_and_modules_come_from_the_wheel(environment: Environment) -> None:
    assert environment.run("exl2flow", "--version") == f"exl2flow {version('exl2flow')}\n"
    files = json.loads(environment.run("python", "-c", WHERE))

    assert len(files) == len(CODE)
    assert [file for file in files if not file.startswith(str(environment.home))] == []


def test_installed_program_converts_with_its_own_calibration_data(
    environment: Environment, tmp_path: Path
) -> None:
    source = make_tiny("llama", tmp_path / "model", num_hidden_layers=1)
    out = tmp_path / "out"

    rows = "--rows 4 --row-tokens 64 --measure-rows 1 --measure-row-tokens 64 --validate-rows 2"
    rest = "--validate-row-tokens 64 --quality fast --bpw 4.5 --no-prefect --device cpu --json"

    text = environment.run(
        "exl2flow", "convert", str(source), "--out", str(out), *rows.split(), *rest.split()
    )

    report = json.loads(text)
    assert report["score"]["tokens"] == 2 * 63
    assert report["score"]["kl_divergence"] < 0.1
    assert (out / "model.safetensors").stat().st_size == report["score"]["bytes"]
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    assert block["calibration"]["dataset"] == "(default)"
