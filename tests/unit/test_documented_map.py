"""The map in `docs/architecture.md` and the pages for contributors show the tree as it is."""

import re
import tomllib
from pathlib import Path

import pytest

from exl2flow.pipeline.stages import REFINE_STAGES, STAGES

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
REFERENCE = ROOT / "docs" / "reference"
# pages for contributors, and how many paths each names at least
PAGES = {
    ARCHITECTURE: 50,
    ROOT / "CONTRIBUTING.md": 10,
    REFERENCE / "development.md": 40,
    REFERENCE / "glossary.md": 20,
    REFERENCE / "dependencies.md": 4,
}
# folders on the map that are no packages
NO_CODE = {"demo", "tests", "benchmarks", "campaigns", "docs"}
HELD = {"kernels/csrc"}  # folders below a package that hold other files
SUFFIXES = "|".join(("py", "toml", "md", "txt", "yaml", "cu", "cuh", "j2", "jinja"))
NAMED = re.compile(rf"`([\w.*-]+/(?:[\w.*-]+/)*[\w.*-]*|[\w./-]+\.(?:{SUFFIXES})|Makefile)`")
MADE_LATER = ("dist/",)


def drawn() -> dict[str, str]:
    """Return the folders of the map in their order, each with what it says of it."""
    block = ARCHITECTURE.read_text(encoding="utf-8").partition("## The map\n")[2]
    found: dict[str, str] = {}
    parents: list[str] = []
    for line in block.partition("```\n")[2].partition("\n```")[0].splitlines():
        match = re.fullmatch(r"( *)([\w.]+)/ +(\S.*)", line)
        assert match, line
        depth = len(match[1]) // 2
        parents[depth:] = [match[2]]
        found["/".join(parents)] = match[3]
    return found


def packages() -> set[str]:
    """Return the folders of the package, relative to the root."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = project["tool"]["setuptools"]["packages"]
    folders = project["tool"]["setuptools"]["package-dir"]
    return {folders.get(name, name.removeprefix("exl2flow.")).replace(".", "/") for name in names}


def named_paths(page: Path) -> set[str]:
    """Return the files and folders that a page names in code style, other than links."""
    found = set(NAMED.findall(page.read_text(encoding="utf-8")))
    return {path for path in found if not path.startswith(MADE_LATER)}


def is_there(path: str) -> bool:
    """Tell whether a path of a page exists; a bare file name may lie anywhere in the tree."""
    if "/" in path:
        return any(True for _ in ROOT.glob(path.rstrip("/")))
    folders = (*packages(), *NO_CODE, ".")
    return any((ROOT / folder / path).is_file() for folder in folders)


def test_the_map_shows_every_folder_of_the_package_and_no_other() -> None:
    assert set(drawn()) == packages() | NO_CODE | HELD
    assert all((ROOT / folder).is_dir() for folder in drawn())


def test_the_map_shows_stages_in_the_order_in_which_they_run() -> None:
    folders = [folder for folder in drawn() if folder.startswith("quant/")]
    for stages in (STAGES, REFINE_STAGES):
        homes = [stage.run.__module__.split(".") for stage in stages]
        order = list(dict.fromkeys(f"quant/{home[2]}" for home in homes if home[1] == "quant"))

        assert [folder for folder in folders if folder in order] == order


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_folders_that_a_page_names_are_there(page: Path) -> None:
    paths = named_paths(page)

    assert len(paths) >= PAGES[page]
    assert {path for path in paths if not is_there(path)} == set()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("core/store/stage.py", True),
        ("stage.py", True),
        ("kernels/cuda/", True),
        ("kernels/csrc/*.cu", True),
        ("core/stages.py", False),
        ("quant/rounds/", False),
        ("rounds.py", False),
    ],
)
def test_missing_paths_are_found(path: str, expected: bool) -> None:
    assert is_there(path) is expected
