"""Garbage collection is paused for a block, and then as it was."""

import gc

import pytest

from exl2flow.core.runtime.collection import uncollected


@pytest.mark.parametrize("is_on", [True, False])
def test_a_pause_ends_with_what_was_before(is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()
    try:
        with uncollected():
            assert not gc.isenabled()

        assert gc.isenabled() == is_on
    finally:
        gc.enable()


def test_a_failure_ends_the_pause() -> None:
    def fails() -> None:
        with uncollected():
            raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        fails()

    assert gc.isenabled()
