"""Names are words of the glossary in `docs/reference/glossary.md`."""

import ast
from pathlib import Path

import pytest
from sources import FILES, nodes, offenders, parsed

# folder → words that no identifier there has; the glossary has better ones
BANNED = {
    "": {"send_back", "at_the_same_time", "one_ahead", "on_its_way", "used_here"},
    "inference": {
        "guesses",
        "guess",
        "listing",
        "recording",
        "recordings",
        "make_room",
        "pagetable",
        "reach",
        "arrivals",
        "placed",
    },
    "kernels": {"recording", "recordings", "needs_more", "are_known", "has_own_norm"},
    "model": {"multiplied", "adding"},
}


def identifiers(file: str) -> set[str]:
    """Return the names that a file defines, in lower case."""
    found = {Path(file).stem}
    for node in nodes(file):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.arg():
                found.add(node.arg)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.Attribute(ctx=ast.Store()):
                found.add(node.attr)
    return {name.strip("_").lower() for name in found}


@pytest.mark.parametrize("folder", BANNED)
def test_names_are_words_of_the_glossary(folder: str) -> None:
    files = [file for file in FILES if file.startswith(folder) and not file.startswith("compat/")]

    assert offenders(lambda file: identifiers(file) & BANNED[folder], files) == {}


def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for file in FILES:
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(file)

    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
