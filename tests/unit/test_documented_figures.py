"""The figures on README's first screens are those of the benchmarks that it links."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def numbers(text: str) -> list[str]:
    return NUMBER.findall(text)


def section(anchor: str) -> str:
    """Return the section of docs/benchmarks.md that an anchor names, subsections included."""
    lines = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    for start, line in enumerate(lines):
        level, _, title = line.partition(" ")
        slug = re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        if level.startswith("##") and slug == anchor:
            inside = re.compile(rf"{level}#+ |(?!#+ )")
            rest = lines[start + 1 :]
            end = next((i for i, row in enumerate(rest) if not inside.match(row)), len(rest))
            return "\n".join(rest[:end])
    raise LookupError(f"docs/benchmarks.md has no section `{anchor}`")


def bullets() -> dict[str, tuple[str, str]]:
    """Return README's expectations by name: what each says, and the section that it links."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    part = text.partition("## What to expect")[2].partition("## ")[0]
    found = re.findall(
        r"- \*\*(\w+):\*\* (.*?)\(\[[^]]*\]\(docs/benchmarks\.md#([\w-]+)", part, re.S
    )
    return {name: (said, section(anchor)) for name, said, anchor in found}


def test_readme_states_quality_speed_and_decoding() -> None:
    assert [*bullets()] == ["Quality", "Speed", "Decoding"]


@pytest.mark.parametrize("name", [*bullets()])
def test_every_figure_of_readme_is_in_the_section_that_it_links(name: str) -> None:
    said, measured = bullets()[name]
    known = numbers(measured)

    missing = [n for n in numbers(said) if not any(k == n or rounds(k, n) for k in known)]

    assert not missing


def rounds(measured: str, said: str) -> bool:
    """Tell whether a measured decimal, rounded, is what README says."""
    places = len(said.partition(".")[2])
    return (
        places > 0 and "." in measured and f"{float(measured.replace(',', '')):.{places}f}" == said
    )


def test_decoding_speeds_of_readme_are_those_of_one_and_sixteen_sequences() -> None:
    said, measured = bullets()["Decoding"]
    rows = {
        size: cells for size, *cells in re.findall(r"(?m)^\| (\d+) \| (\S+) \| (\S+) \|", measured)
    }

    ours = re.findall(r"([\d,]+) tokens/s for one text and ([\d,]+) for 16", said)
    theirs = re.findall(r"exllamav2 ([\d,]+) .*? and ([\d,]+) ", said, re.S)

    assert ours == [(rows["1"][0], rows["16"][0])]
    assert theirs == [(rows["1"][1], rows["16"][1])]
