"""Recordings on several GPUs and in several threads, over named stand-ins for GPUs."""

import logging
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from gpus import Gpus, stand_in

from exl2flow.kernels.cuda.graphs import CudaGraph, EmptyRecording, GraphPool

CUDA = [torch.device("cuda", index) for index in range(2)]
STEP, OTHER = ("step",), ("other", "adapted")


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    with stand_in() as made:
        yield made


def pool_of(index: int) -> GraphPool:
    return GraphPool(nullcontext, records=True, device=CUDA[index])


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 1)])
def test_each_gpu_records_its_own_launches_whichever_was_first(
    gpus: Gpus, order: tuple[int, ...]
) -> None:
    for index in order:
        pool_of(index).make(STEP, partial(gpus.launch, index))

    assert [graph.nodes for graph in gpus.graphs] == [[CUDA[index]] for index in order]


def test_a_step_of_a_split_model_is_replayed_on_both_gpus(gpus: Gpus) -> None:
    pools = [pool_of(0), pool_of(1)]
    for index, pool in enumerate(pools):
        pool.make(STEP, partial(gpus.launch, index))
    gpus.runs.clear()

    for index, pool in enumerate(pools):
        pool.replay(STEP, partial(gpus.launch, index))

    assert [graph.replays for graph in gpus.graphs] == [1, 1]
    assert gpus.runs == []


def test_threads_have_capture_streams_of_their_own_and_take_turns(gpus: Gpus) -> None:
    both, failed = threading.Barrier(2, timeout=60), list[BaseException]()

    def record() -> None:
        pool = pool_of(0)
        try:
            both.wait()
            for number in range(20):
                pool.make(("step", number), partial(gpus.launch, 0))
            assert not any(pool.is_launched(("step", number)) for number in range(20))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failed == []
    streams = {graph.thread: graph.stream for graph in gpus.graphs}
    assert len({*streams.values()}) == len(streams) == 2
    assert all(graph.stream is streams[graph.thread] for graph in gpus.graphs)


def test_recordings_that_share_memory_share_a_stream_in_any_thread(gpus: Gpus) -> None:
    pool = pool_of(1)
    pool.make(STEP, partial(gpus.launch, 1))
    thread = threading.Thread(target=pool.make, args=(OTHER, partial(gpus.launch, 1)))
    thread.start()
    thread.join()

    first, second = gpus.graphs
    assert second.shared == [first]
    assert second.stream is first.stream


def test_an_empty_recording_is_an_error(gpus: Gpus) -> None:
    with pytest.raises(EmptyRecording, match="nothing was launched on `cuda:0`"):
        CudaGraph(partial(gpus.launch, 1))

    assert gpus.current_stream().graph is None


def test_work_whose_recording_is_empty_is_launched_with_one_warning(
    gpus: Gpus, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_of(0)
    gpus.runs.clear()

    with caplog.at_level(logging.WARNING):
        pool.replay(STEP, partial(gpus.launch, 1))
        launched = len(gpus.runs)
        pool.replay(STEP, partial(gpus.launch, 1))

    assert len(gpus.runs) == launched + 1
    (record,) = caplog.records
    assert "cannot be recorded and is launched" in record.message
    assert "`cuda:0`" in record.message


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("it waits")])
def test_what_cannot_be_recorded_leaves_the_recordings_of_other_work(
    gpus: Gpus, error: RuntimeError
) -> None:
    pool, tried = pool_of(0), list[bool]()

    def fails_in_a_capture() -> None:
        tried.append(any(graph.is_capturing for graph in gpus.graphs))
        if tried[-1]:
            raise error

    pool.make(STEP, partial(gpus.launch, 0))
    pool.replay(OTHER, fails_in_a_capture)
    pool.replay(OTHER, fails_in_a_capture)
    pool.replay(STEP, partial(gpus.launch, 0))
    pool.make(("third",), partial(gpus.launch, 0))

    assert tried == [False, False, True, False, False]
    assert pool.is_launched(OTHER)
    assert not pool.is_launched(STEP)
    first, _, third = gpus.graphs
    assert first.replays == 1
    assert third.shared == []  # memory that a failed capture used is left alone
    assert gpus.current_stream() is not first.stream


def test_what_could_not_be_recorded_is_tried_again_once_its_tensors_move(gpus: Gpus) -> None:
    pool = pool_of(0)
    pool.make(OTHER, partial(gpus.launch, 1))
    assert pool.is_launched(OTHER)

    pool.forget("adapted")
    pool.make(OTHER, partial(gpus.launch, 0))

    assert not pool.is_launched(OTHER)
    assert gpus.graphs[-1].nodes == [CUDA[0]]
