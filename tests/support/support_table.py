"""Write the table of `docs/reference/models.md` from results of tests.

It takes about seven minutes on two cores.

The models of a row are written by hand, in the page itself; everything else is replaced.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import checkpoints
import published
from exllamav2_names import NAMES

from exl2flow.model.config.families import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "models.md"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
ROW = re.compile(r"^\| `(\w+)` \| (?:`(\w+)`)? *\|(.*)\|$", re.MULTILINE)
PASSED, FAILED, WITHOUT = "✓", "✗", "–"  # the last: the row has no such test

Key = tuple[str, str | None]  # of a row: architecture, text model


@dataclass(frozen=True, slots=True)
class Column:
    """A test with a case for each of these names, and which row a name belongs to."""

    title: str
    test: str
    names: Iterable[str]
    row_of: Callable[[str], Key]


FAMILY_TESTS, CONVERSIONS = "tests/unit/model/config/test_families.py", "tests/e2e/test_families.py"
_CHECKPOINTS = (checkpoints.CHECKPOINTS, checkpoints.row_of)
COLUMNS = (
    Column("logits", f"{FAMILY_TESTS}::test_logits_agree_at_every_length", *_CHECKPOINTS),
    Column("steps", f"{FAMILY_TESTS}::test_cached_steps_agree", *_CHECKPOINTS),
    Column("converts", f"{CONVERSIONS}::test_family_converts_and_loads", *_CHECKPOINTS),
    Column(
        "tunes", f"{CONVERSIONS}::test_family_converts_with_gradients_and_tuning", *_CHECKPOINTS
    ),
    Column("resumes", f"{CONVERSIONS}::test_family_resumes_after_kills", *_CHECKPOINTS),
    Column(
        "parameters",
        "tests/unit/model/config/test_published.py::test_published_config_gives_the_published_count",
        published.PUBLISHED,
        published.row_of,
    ),
    Column(
        "exllamav2's names",
        "tests/unit/model/config/test_exllamav2_names.py"
        "::test_conversion_writes_the_names_that_exllamav2_loads",
        NAMES,
        checkpoints.row_of,
    ),
)


def cases(column: Column, row: Key) -> list[str]:
    """Return the names that concern a row."""
    return [name for name in column.names if column.row_of(name) == row]


def listed(page: str) -> dict[Key, tuple[str, list[str]]]:
    """Return the models and the marks of each row of the table."""
    rows = {}
    for name, kind, cells in ROW.findall(page):
        key = name, kind or None
        assert key not in rows, key
        models, *marks = (cell.strip() for cell in cells.split("|"))
        rows[key] = models, marks
    return rows


def run_tests() -> set[tuple[str, str]]:
    """Run the tests of all columns; return the function and the name of the cases that passed."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        tests = [column.test for column in COLUMNS]
        options = ["-m", "pytest", "-q", "-n", "2", f"--junitxml={results}"]
        subprocess.run([sys.executable, *options, *tests], cwd=ROOT, check=False)
        done = ElementTree.parse(results).iter("testcase")
        good = [case.attrib["name"] for case in done if not len(case)]  # no failure, error or skip
    return {(test, name.removesuffix("]")) for test, _, name in (n.partition("[") for n in good)}


def mark(column: Column, row: Key, passed: set[tuple[str, str]]) -> str:
    """Return whether all cases of a row passed."""
    test = column.test.rpartition("::")[2]
    results = [(test, name) in passed for name in cases(column, row)]
    return WITHOUT if not results else PASSED if all(results) else FAILED


def table(page: str, passed: set[tuple[str, str]]) -> str:
    """Return the table, with the models that the page lists."""
    models = {row: text for row, (text, _) in listed(page).items()}
    titles = ("architecture", "text model", "models", *(column.title for column in COLUMNS))
    lines = [titles, ("---",) * len(titles)]
    for row in FAMILIES:
        names = (f"`{row[0]}`", f"`{row[1]}`" if row[1] else "", models.get(row, ""))
        lines.append((*names, *(mark(column, row, passed) for column in COLUMNS)))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """Run the tests and write the page; return 1 if a test failed."""
    passed, page = run_tests(), PAGE.read_text(encoding="utf-8")
    page, count = TABLE.subn(lambda _: table(page, passed), page)
    assert count == 1
    PAGE.write_text(page, encoding="utf-8")
    return int(FAILED in page)


if __name__ == "__main__":
    sys.exit(main())
