"""What `pyproject.toml` lists is what the tree holds: an omission would only show in a wheel."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS: dict[str, Any] = PROJECT["tool"]["setuptools"]
FACADE = "package"  # what `import exl2flow` gives: a docstring and the version
TOP = sorted({*SETUPTOOLS["package-dir"].values()} - {FACADE})
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
SOURCES = ("calibration_data/text", "calibration_data/heldout")  # of the Parquet files, not shipped
NOT_PACKAGES = {"benchmarks", "build", "campaigns", "demo", "demo-exl2", "dist", "docs", "tests"}
CARRIED_BY = {
    "h11": "uvicorn",
    "docket": "pydocket",
    "markdown_it": "markdown-it-py",
    "pydantic_core": "pydantic",
    "httpx": "prefect",
    "packaging": "huggingface_hub",
    "starlette": "fastapi",
    "yaml": "pyyaml",
}  # a dependency's own dependency
OPTIONAL = {"cupy", "prefect_dask", "prefect_ray"}  # asked for by extras of their own


def normalized(requirement: str) -> str:
    """Return the distribution's name of a requirement."""
    return re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("==") for line in lines if "==" in line)
    return {normalized(name): value.split()[0] for name, _, value in pairs}


def code_folders() -> set[str]:
    """Return the folders below the root that hold modules of the package."""
    return {
        str(path.parent.relative_to(ROOT)) for top in TOP for path in (ROOT / top).rglob("*.py")
    }


def test_every_package_of_the_tree_is_listed() -> None:
    expected = sorted("exl2flow." + folder.replace("/", ".") for folder in code_folders())

    assert SETUPTOOLS["packages"] == ["exl2flow", *expected]


def test_links_lead_tools_to_every_top_folder() -> None:
    init, *links = sorted((ROOT / ".links" / "exl2flow").iterdir())

    assert init.resolve() == ROOT / FACADE / "__init__.py"
    assert [link.name for link in links] == TOP
    assert [link for link in links if link.resolve() != ROOT / link.name] == []
    assert PROJECT["tool"]["mypy"]["mypy_path"] == ".links"
    assert PROJECT["tool"]["pyright"]["extraPaths"] == [".links"]


def test_every_top_folder_is_mapped_and_typed() -> None:
    mapped = {f"exl2flow.{folder}": folder for folder in TOP}
    assert mapped | {"exl2flow": FACADE} == SETUPTOOLS["package-dir"]
    untyped = [f for f in (*TOP, FACADE) if not (ROOT / f / "py.typed").is_file()]
    assert untyped == []
    others = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".") and list(path.glob("*.py"))
    }
    assert others - NOT_PACKAGES == {*TOP, FACADE}


def test_every_package_has_an_init() -> None:
    assert [f for f in sorted(code_folders()) if not (ROOT / f / "__init__.py").is_file()] == []


def test_every_data_file_is_listed() -> None:
    data = SETUPTOOLS["package-data"]
    patterns = {
        ROOT.joinpath(*package.split(".")[1:]): [*data.get(package, []), *data["*"]]
        for package in SETUPTOOLS["packages"][1:]
    }
    forgotten = []
    for top in TOP:
        for path in (ROOT / top).rglob("*"):
            folder = str(path.parent.relative_to(ROOT))
            if path.suffix in (".py", ".pyc") or path.is_dir() or folder.startswith(SOURCES):
                continue
            package = next((p for p in path.parents if p in patterns), ROOT)
            inside = path.relative_to(package)
            if not any(inside.match(pattern) for pattern in patterns.get(package, [])):
                forgotten.append(str(path.relative_to(ROOT)))

    assert forgotten == []


def test_calibration_data_is_where_the_package_looks_for_it() -> None:
    calibration_data = import_module("exl2flow.calibration_data")

    for path in (calibration_data.standard(), calibration_data.heldout()):
        assert path.is_file()
        assert path.match(SETUPTOOLS["package-data"]["exl2flow.calibration_data"][0])


def test_no_folder_shadows_an_installed_package() -> None:
    assert not (ROOT / "exl2flow").exists()


def test_command_is_a_function() -> None:
    (entry,) = PROJECT["project"]["scripts"].values()
    module, _, name = entry.partition(":")

    assert callable(getattr(import_module(module), name))


def test_installed_version_is_that_of_the_project() -> None:
    package = import_module("exl2flow")

    assert package.__version__ == version("exl2flow") == PROJECT["project"]["version"]
    assert package.__doc__


def test_every_dependency_is_pinned() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["convert"], *extras["prefect"], *extras["dev"]]

    free = {"exl2flow", "nvidia-cuda-nvrtc"}  # torch for CUDA chooses the latter
    missing = {normalized(requirement) for requirement in wanted} - {*free, *pinned()}

    assert not missing
    assert pinned()["torch"] == "2.13.0"


def declared(*extras: str) -> set[str]:
    """Return the distributions that an installation with extras brings."""
    project = PROJECT["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][name] for name in extras)]
    return {normalized(requirement) for group in groups for requirement in group}


def imported(folders: Iterable[str]) -> set[str]:
    """Return the distributions of the libraries that files of these folders import."""
    found: set[str] = set()
    for path in (path for top in folders for path in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).partition(".")[0])
    foreign = found - sys.stdlib_module_names - OPTIONAL - {"exl2flow"}
    return {CARRIED_BY.get(name, name).lower().replace("_", "-") for name in foreign}


@pytest.mark.parametrize(
    ("extras", "folders"),
    [
        ((), ("core", "kernels", "model", "engine", "serve", "compat", "cli", "pipeline")),
        (("convert",), ("quant", "inference", "calibration_data")),
        (("prefect",), ("tasks", "flows")),
    ],
)
def test_every_imported_library_is_a_dependency(
    extras: tuple[str, ...], folders: tuple[str, ...]
) -> None:
    assert imported(folders) - declared(*extras) == set()


@pytest.mark.parametrize("extra", ["convert", "prefect", "cuda12", "cuda13", "dask", "ray", "dev"])
def test_extra_is_offered(extra: str) -> None:
    assert PROJECT["project"]["optional-dependencies"][extra]


@pytest.mark.parametrize("extra", ["grammar", "serve"])
def test_extra_of_an_earlier_version_can_still_be_named(extra: str) -> None:
    assert PROJECT["project"]["optional-dependencies"][extra] == []


def test_messages_and_pages_install_what_a_registry_has() -> None:
    """The project itself is on no registry; an unquoted bracket fails in zsh."""
    files = [path for top in TOP for path in (ROOT / top).rglob("*.py")]
    wrong = re.compile(r"(?<!/)exl2flow\[[\w,]+\](?! @ git\+https://)|pip install (-e )?\.\[")

    for path in [*files, *PAGES]:
        assert not wrong.search(path.read_text(encoding="utf-8")), path


def test_pages_install_from_the_repository_in_quotes_with_extras_that_exist() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = re.findall(
        r"(\S*)exl2flow\[([\w,]+)\] @ git\+https://github.com/OWNER/exl2flow(\S)", text
    )

    assert {(before, after) for before, _, after in named} == {("'", "'")}
    assert {extra for _, extras, _ in named for extra in extras.split(",")} <= {
        *PROJECT["project"]["optional-dependencies"]
    }


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_what_the_pages_make_of_the_demo_model_is_ignored_and_cleaned() -> None:
    pages = [ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    texts = [path.read_text(encoding="utf-8") for path in pages]
    made = {name for text in texts for name in re.findall(r"demo/model --out (\S+)", text)}
    recipe = texts[0].partition("\nclean:")[2].split()

    for name in made:
        assert subprocess.run(["git", "check-ignore", "-q", f"{name}/"], cwd=ROOT).returncode == 0
        assert any(PurePath(name).match(pattern) for pattern in recipe), name
    assert len(made) > 1
