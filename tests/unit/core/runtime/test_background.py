"""Work done by a thread: in order, with context, errors brought back, nothing after an error."""

import threading
import time
from contextvars import ContextVar
from functools import partial
from itertools import count

import pytest
import torch

from exl2flow.core.runtime.background import MOST_WAITING, Background, prefetch, send_async, to_host

CPU, GPU = torch.device("cpu"), torch.device("cuda")  # only the kind counts here

where: ContextVar[str] = ContextVar("where")


def test_beside_a_gpu_work_is_done_in_order_by_another_thread() -> None:
    done: list[tuple[int, bool]] = []

    def work(number: int) -> None:
        done.append((number, threading.current_thread() is threading.main_thread()))

    with Background(GPU) as background:
        for number in range(5):
            background.submit(partial(work, number))

    assert done == [(number, False) for number in range(5)]


def test_where_the_cpu_computes_work_is_done_at_once() -> None:
    done: list[int] = []
    with Background(CPU) as background:
        background.submit(lambda: done.append(1))
        assert done == [1]


def test_few_pieces_wait() -> None:
    gate, begun = threading.Event(), list[int]()

    def work(number: int) -> None:
        gate.wait(5)
        begun.append(number)

    with Background(GPU) as background:
        for number in range(MOST_WAITING):
            background.submit(partial(work, number))
        late = threading.Thread(target=lambda: background.submit(partial(work, 9)))
        late.start()
        late.join(0.1)
        assert late.is_alive()
        gate.set()
        late.join(5)

    assert begun == [*range(MOST_WAITING), 9]


@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.parametrize("at_once", [True, False])
def test_an_error_reaches_the_caller_and_what_waits_behind_is_not_done(
    waiting: int, at_once: bool
) -> None:
    gate, done = threading.Event(), list[int]()
    if at_once:
        gate.set()

    def fail() -> None:
        gate.wait(5)
        raise OSError("the disk is full")

    def later() -> None:
        with Background(GPU) as background:
            background.submit(fail)
            for _ in range(waiting):
                background.submit(lambda: done.append(1))
            gate.set()

    with pytest.raises(OSError, match="the disk is full"):
        later()
    assert not done


@pytest.mark.parametrize(
    ("pieces", "told"), [(2, []), (3, ["waited 1.5s for results to be written"])]
)
def test_a_caller_that_waits_long_for_writes_is_told(
    pieces: int, told: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="exl2flow")
    clock = count(0.0, 0.5)  # half a second passes in each wait
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))

    with Background(GPU) as background:
        for _ in range(pieces):
            background.submit(lambda: None)

    assert caplog.messages == told


def test_an_error_of_the_caller_waits_for_what_was_submitted() -> None:
    gate, done = threading.Event(), list[int]()

    def work() -> None:
        gate.wait(5)
        done.append(1)

    def fail() -> None:
        with Background(GPU) as background:
            background.submit(work)
            gate.set()
            raise KeyError("other")

    with pytest.raises(KeyError):
        fail()
    assert done == [1]


def test_work_begins_when_that_before_it_has_ended() -> None:
    running = threading.Lock()
    alone: list[bool] = []

    def work() -> None:
        alone.append(running.acquire(blocking=False))
        time.sleep(0.05)
        running.release()

    with Background(GPU) as background:
        for _ in range(3):
            background.submit(work)

    assert alone == [True] * 3


def test_few_results_wait_to_be_written() -> None:
    gate, written = threading.Event(), list[int]()

    def write(number: int) -> int:
        gate.wait(5)
        return number

    with Background(GPU) as background:
        for number in range(MOST_WAITING):
            background.store(partial(write, number), written.append)
        late = threading.Thread(
            target=lambda: background.store(lambda: written.append(-1) or 9, written.append)
        )
        late.start()
        late.join(0.1)
        assert written == []  # not even begun
        gate.set()
        late.join(5)

    assert [number for number in written if number >= 0] == [*range(MOST_WAITING), 9]


def test_no_thread_stays_behind() -> None:
    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("exl2flow-store")}

    before = threads()
    with Background(GPU) as background:
        background.submit(lambda: None)
        assert threads() > before

    assert threads() <= before


def test_work_sees_the_context_of_the_caller() -> None:
    seen: list[str] = []
    where.set("here")
    with Background(GPU) as background:
        background.submit(lambda: seen.append(where.get()))

    assert seen == ["here"]


def test_tensors_in_main_memory_are_passed_on() -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}

    found = to_host(tensors)()

    assert found["a"] is tensors["a"]
    assert found["b"] is tensors["b"]


def test_where_the_cpu_computes_no_thread_is_used() -> None:
    threads: list[str] = []

    with Background(CPU) as background:
        background.submit(lambda: threads.append(threading.current_thread().name))
        background.store(lambda: threading.current_thread().name, threads.append)

    assert threads == [threading.current_thread().name] * 2
    assert background.is_idle()


def test_results_are_written_in_parallel_and_committed_in_order() -> None:
    begun = threading.Event()
    found: list[object] = []

    def slow() -> str:
        assert begun.wait(10)
        return "first"

    def quick() -> str:
        begun.set()  # while the first is being written
        return "second"

    with Background(GPU) as background:
        for write in (slow, quick):
            background.store(write, found.append)

    assert found == ["first", "second"]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_one_runs_ahead_of_the_result_in_use(count: int) -> None:
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        return 10 * number

    found = []
    for result in prefetch(partial(work, number) for number in range(count)):
        next_one = min(len(found) + 1, count - 1)
        deadline = time.monotonic() + 10
        while next_one not in begun and time.monotonic() < deadline:
            time.sleep(0.001)
        assert begun[-1] == next_one  # it runs already, and the one after it does not
        found.append(result)

    assert found == [10 * number for number in range(count)]


def test_tensor_on_its_way_to_the_cpu_stays() -> None:
    tensor = torch.ones(3)

    assert send_async(tensor, "cpu") is tensor
