"""CTAs that wait for each other and start one by one: on one stream, beside those of another."""

import time

import pytest
import torch
from device_products import DEVICE, chain, inputs

from exl2flow.kernels import get_ops
from exl2flow.kernels.cuda import compiler
from exl2flow.kernels.cuda.graphs import CudaGraph

pytestmark = pytest.mark.gpu

SECONDS = 30  # a step takes 50 µs


def wait(event: torch.cuda.Event) -> None:
    """Wait for an event, but not for ever: CTAs that wait for places that others hold never end."""
    end = time.monotonic() + SECONDS
    while not event.query():
        assert time.monotonic() < end, "the device does not come to an end"
        time.sleep(0.01)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_chains_of_two_streams_come_to_an_end(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, models = get_ops(DEVICE), [chain(), chain()]
    x, hidden = inputs(rows)
    streams = [torch.cuda.Stream() for _ in models]
    expected = [ops.multiply(x, products, hidden)[0][0] for products in models]
    torch.cuda.synchronize()
    monkeypatch.setattr(compiler, "_FIRST_STREAMS", {})  # now the first of these streams

    found = list[torch.Tensor]()
    for _ in range(500):
        found = []
        for products, stream in zip(models, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(ops.multiply(x, products, hidden)[0][0])
    for stream in streams:
        wait(stream.record_event())

    if rows <= 4:  # more rows share their sums
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_chain_starts_early_in_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_FIRST_STREAMS", {})
    monkeypatch.setattr(compiler, "_ACCEPTED", set())
    ops, products = get_ops(DEVICE), chain()
    x, hidden = inputs(1)
    gangs = list[bool]()
    real = compiler._begins_early

    def seen(*given: object) -> bool:
        gangs.append(not real(*given))  # type: ignore[arg-type]  # all of its arguments
        return not gangs[-1]

    monkeypatch.setattr(compiler, "_begins_early", seen)

    graph = CudaGraph(lambda: ops.multiply(x, products, hidden)[0][0])

    first, *others = gangs
    assert first
    assert not any(others)
    expected = ops.multiply(x, products, hidden)[0][0]
    for _ in range(100):
        assert torch.equal(graph.replay(), expected)
