"""The table of models is the table of families, with a mark for each test that a row has."""

import pytest
from support_table import COLUMNS, PAGE, PASSED, WITHOUT, Column, cases, listed

from exl2flow.model.config.families import FAMILIES

ROWS = listed(PAGE.read_text(encoding="utf-8"))


def test_documented_models_are_the_families() -> None:
    assert [*ROWS] == [*FAMILIES]
    assert all(models for models, _ in ROWS.values())


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.title)
def test_every_mark_is_the_result_of_a_test(column: Column) -> None:
    place = COLUMNS.index(column)
    marks = {row: marks[place] for row, (_, marks) in ROWS.items()}

    assert marks == {row: PASSED if cases(column, row) else WITHOUT for row in FAMILIES}


def test_rows_know_which_models_exllamav2_loads() -> None:
    [place] = [i for i, column in enumerate(COLUMNS) if column.title == "exllamav2's names"]

    listed_there = {row for row, (_, marks) in ROWS.items() if marks[place] == PASSED}

    assert {row for row, family in FAMILIES.items() if family.is_in_exllamav2} == listed_there


def test_every_family_is_compared_with_transformers_and_converted() -> None:
    titles = ("logits", "steps", "converts", "tunes", "resumes")
    columns = [column for column in COLUMNS if column.title in titles]

    assert len(columns) == len(titles)
    for column in columns:
        assert [row for row in FAMILIES if not cases(column, row)] == []
