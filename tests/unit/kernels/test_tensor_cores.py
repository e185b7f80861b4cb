"""The precision of products is a process-wide switch, shared by blocks of several threads."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch

from exl2flow.kernels import tensor_cores
from exl2flow.kernels.streams import runs_beside

SECONDS = 10.0  # a thread that waits longer is stuck


def is_on() -> bool:
    return torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(params=[False, True], ids=["off before", "on before"], autouse=True)
def before(request: pytest.FixtureRequest) -> Iterator[bool]:
    """The state of the switch outside all blocks."""
    kept = is_on()
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = kept


def test_blocks_inside_one_another_restore_what_was_before(before: bool) -> None:
    with tensor_cores():
        assert is_on()
        with tensor_cores(False):
            assert not is_on()
        assert is_on()

    assert is_on() == before


def test_work_that_runs_concurrently_may_not_switch(before: bool) -> None:
    def work() -> None:
        runs_beside.set(True)
        with tensor_cores(before):
            assert is_on() == before
        with pytest.raises(RuntimeError, match="may not switch"), tensor_cores(not before):
            pass
        assert is_on() == before

    copy_context().run(work)

    assert not runs_beside.get()


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_overlapping_threads_neither_lose_the_switch_nor_leave_it_on(
    first_ends_first: bool, before: bool
) -> None:
    both = threading.Barrier(2)
    first_has_left, second_has_left = threading.Event(), threading.Event()
    seen: list[bool] = []

    def first() -> None:
        with tensor_cores():
            both.wait(SECONDS)
            if not first_ends_first:
                assert second_has_left.wait(SECONDS)
                seen.append(is_on())
        first_has_left.set()

    def second() -> None:
        with tensor_cores():
            both.wait(SECONDS)
            if first_ends_first:
                assert first_has_left.wait(SECONDS)
                seen.append(is_on())
        second_has_left.set()

    with ThreadPoolExecutor(2) as pool:
        for work in [pool.submit(first), pool.submit(second)]:
            work.result()

    assert seen == [True]
    assert is_on() == before


def test_an_error_ends_the_block(before: bool) -> None:
    with pytest.raises(ValueError, match="wrong"), tensor_cores(not before):
        raise ValueError("wrong")

    assert is_on() == before
