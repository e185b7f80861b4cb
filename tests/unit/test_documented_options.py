"""The tables of options in the reference are those of the commands and of the configuration."""

from pathlib import Path

import pytest
from option_tables import PAGES, TABLE, written


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_what_the_script_writes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert written(text) == text, "run tests/support/option_tables.py"


def test_no_table_of_a_page_was_left_out() -> None:
    found = [match[3] for page in PAGES for match in TABLE.finditer(page.read_text("utf-8"))]

    assert len(found) >= 15
    assert {"convert", "generate", "chat", "ConversionConfig", "SweepConfig"} <= set(found)


def test_a_changed_default_changes_the_page() -> None:
    text = PAGES[0].read_text(encoding="utf-8")

    assert written(text.replace("| 115 |", "| 116 |")) == text
    assert "| 115 |" in text
