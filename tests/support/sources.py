"""The files of the package, parsed."""

import ast
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
BELOW: dict[str, set[str]] = {
    "core": set(),
    "calibration_data": set(),
    "kernels": {"core"},
    "model": {"core", "kernels"},
    "quant": {"core", "kernels", "model", "calibration_data"},
    "engine": {"core", "kernels", "model"},
}
BELOW["inference"] = {"core", "kernels", "model", "quant", "engine", "calibration_data"}
BELOW["pipeline"] = {"core", "kernels", "model", "quant", "engine", "inference"}
BELOW["tasks"] = {"core", "model", "quant", "inference", "pipeline"}
BELOW["serve"] = BELOW["compat"] = {"core", "kernels", "model", "engine"}
BELOW["cli"] = {*BELOW["pipeline"], "pipeline", "serve"}
BELOW["flows"] = {"core", "inference", "pipeline", "tasks", "cli"}
FOLDERS = set(BELOW)


def package_files() -> list[str]:
    return sorted(
        str(path.relative_to(ROOT)) for name in FOLDERS for path in (ROOT / name).rglob("*.py")
    )


FILES = package_files()


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


@cache
def nodes(file: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a file; many tests look at them."""
    return tuple(ast.walk(parsed(file)))


def offenders(
    find: Callable[[str], Iterable[str]], files: Iterable[str] = FILES
) -> dict[str, set[str]]:
    """Return file → what is found there and should not be."""
    found = {file: set(find(file)) for file in files}
    return {file: words for file, words in found.items() if words}
