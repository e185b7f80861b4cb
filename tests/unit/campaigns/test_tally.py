"""A campaign ends in time, and every part of it gets a share."""

import time

import pytest
import tally


def test_parts_share_the_time_that_those_before_them_left() -> None:
    ends = tally.ends(2, 10.0)
    begun = time.monotonic()

    assert next(ends) - begun == pytest.approx(5.0, abs=0.5)
    assert next(ends) - begun == pytest.approx(10.0, abs=0.5)  # the first took no time
    assert list(ends) == []


def test_numbers_stop_when_the_time_is_over() -> None:
    assert list(tally.within(3, time.monotonic() + 60)) == [0, 1, 2]
    assert list(tally.within(3, time.monotonic() - 1)) == []
