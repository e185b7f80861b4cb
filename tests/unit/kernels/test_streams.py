"""Work beside other work, as far as a CPU shows it."""

import threading
import time

import pytest
import torch

from exl2flow.kernels import at_the_same_time
from exl2flow.kernels.streams import kept, sent

CPU = torch.device("cpu")


def test_what_is_kept_is_made_once_however_many_ask() -> None:
    made = []

    @kept
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

    assert at_the_same_time([lambda: work(1), lambda: work(2)], CPU) == [10, 20]
    assert order == [1, 2]


def test_an_error_of_the_work_is_raised() -> None:
    def fail() -> None:
        raise ValueError("it")

    with pytest.raises(ValueError, match="it"):
        at_the_same_time([fail, fail], CPU)
