"""The report in the tutorial is the one that its command prints."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "convert-your-first-model.md"
TITLES = ("Validation", "Bits per weight", "Where the divergence comes from")
NUMBER = re.compile(r"\d[\d,.]*(?:e-\d+)?")


def sections(text: str) -> dict[str, list[str]]:
    """Return title → lines of a printed report, with single blanks."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        title = next((title for title in TITLES if line.startswith(title)), None)
        if title is not None:
            lines = found.setdefault(title, [])
        elif line.strip() and "─" not in line:
            lines.append(" ".join(line.split()))
        elif "╭" in line:
            break
    return found


def figures(line: str) -> list[float]:
    return [float(number.replace(",", "").rstrip(".")) for number in NUMBER.findall(line)]


def command() -> str:
    """Return the command of the page that converts."""
    return next(
        block.replace("\\\n", " ")
        for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        if "--no-prefect" in block
    )


@pytest.mark.slow
def test_the_report_that_the_tutorial_shows_is_printed(tmp_path: Path) -> None:
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    program, *arguments = shlex.split(command())
    assert program == "exl2flow"

    done = subprocess.run(
        [sys.executable, "-m", "exl2flow.flows.cli", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    (block,) = re.findall(
        r"^```\n(Validation\n.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    shown, printed = sections(block), sections(done.stdout)
    assert list(shown) == list(TITLES)
    validation = list(zip(shown["Validation"], printed["Validation"], strict=True))
    for ours, theirs in validation:
        assert NUMBER.sub("#", ours) == NUMBER.sub("#", theirs)
        is_divergence = ours.startswith("KL")
        # threads and processors sum in other orders, and then round a few weights otherwise
        assert figures(theirs) == pytest.approx(figures(ours), rel=0.25 if is_divergence else 0.03)
    first = [line for line in shown["Validation"] if line.startswith("weights on disk")]
    assert first == [line for line in printed["Validation"] if line.startswith("weights on disk")]
    names = [re.findall(r"(\S+) \d\.\d+", " ".join(s["Bits per weight"])) for s in (shown, printed)]
    assert names[0] == names[1]
    assert len(names[0]) == 9


def test_perplexity_rises_as_bits_fall_in_the_table_of_the_tutorial() -> None:
    rows = re.findall(r"^\| \d\.\d \| \S+ MB \| (\S+) \| (\S+) \|", PAGE.read_text(), re.MULTILINE)

    perplexities, divergences = zip(*rows, strict=True)
    assert len(rows) == 6
    assert list(perplexities) == sorted(perplexities, key=float)
    assert list(divergences) == sorted(divergences, key=float)
