"""Concurrent work, as far as a CPU can test it."""

import threading
import time
from functools import partial

import pytest
import torch

from exl2flow.kernels import Threads, run_concurrently
from exl2flow.kernels.streams import device_cache, sent

CPU = torch.device("cpu")


def test_device_cache_calls_its_function_once_for_many_threads() -> None:
    made = []

    @device_cache
    def table(number: int) -> torch.Tensor:
        made.append(number)
        time.sleep(0.05)
        return sent(torch.full((2,), number), CPU)

    found: list[torch.Tensor] = []
    askers = [threading.Thread(target=lambda: found.append(table(3))) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()

    assert made == [3]
    assert all(one is found[0] for one in found)
    assert table(4).tolist() == [4, 4]


def test_work_on_a_cpu_is_done_in_turn() -> None:
    order: list[int] = []

    def work(number: int) -> int:
        order.append(number)
        return 10 * number

    assert run_concurrently([lambda: work(1), lambda: work(2)], CPU) == [10, 20]
    assert order == [1, 2]


def test_an_error_of_the_work_is_raised() -> None:
    def fail() -> None:
        raise ValueError("it")

    with pytest.raises(ValueError, match="it"):
        run_concurrently([fail, fail], CPU)


def test_threads_begin_works_in_order_and_do_them_side_by_side() -> None:
    both = threading.Barrier(2, timeout=60)
    order: list[int] = []

    def work(number: int) -> int:
        order.append(number)
        both.wait()
        return 10 * number

    with Threads(2, CPU) as threads:
        begun = [threads.begin(partial(work, number)) for number in range(4)]
        results = [item.result() for item in begun]

    assert results == [0, 10, 20, 30]
    assert set(order[:2]) == {0, 1}


def test_work_that_has_not_started_is_dropped_when_the_block_ends() -> None:
    done: list[int] = []
    waits, may_end = threading.Event(), threading.Event()

    def first() -> None:
        waits.set()
        may_end.wait(60)
        done.append(0)

    def fail() -> None:
        with Threads(1, CPU) as threads:
            threads.begin(first)
            threads.begin(lambda: done.append(1))
            waits.wait(60)
            threading.Timer(0.1, may_end.set).start()
            raise ValueError("it")

    with pytest.raises(ValueError, match="it"):
        fail()

    assert done == [0]


@pytest.mark.parametrize("inference", [False, True])
def test_threads_have_the_caller_s_mode(inference: bool) -> None:
    with torch.inference_mode(inference), Threads(1, CPU) as threads:
        made = threads.begin(lambda: torch.zeros(1)).result()

    assert made.is_inference() == inference
