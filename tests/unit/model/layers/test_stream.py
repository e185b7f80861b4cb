"""Sublayers are begun ahead of their use, by as many as are asked for."""

from collections.abc import Callable
from typing import Any

import pytest

from exl2flow.core.runtime.background import look_ahead
from exl2flow.model.layers.stream import rows_together


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_as_many_items_as_the_depth_says_are_begun_before_a_result_is_used(depth: int) -> None:
    events = list[str]()

    def begin(item: int) -> Callable[[], Any]:
        events.append(f"begin {item}")
        return lambda: item

    for item in look_ahead(range(4), begin, depth=depth):
        events.append(f"use {item}")

    for item in range(4):
        before = events[: events.index(f"use {item}")]
        assert sum(event.startswith("begin") for event in before) == min(4, item + 1 + depth)
    assert [event for event in events if event.startswith("use")] == [f"use {i}" for i in range(4)]


def test_at_least_one_row_passes_and_at_most_what_is_allowed() -> None:
    row = 12 * 100 * 64 * 4

    found = [rows_together(64, 100, n * row, tensors=12, most=3) for n in (0, 1, 2, 9)]

    assert found == [1, 1, 2, 3]
    assert rows_together(64, 100, 9 * row, tensors=12, most=0) == 1
