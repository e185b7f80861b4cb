"""The worker's program: what it takes from the queue while it still has a run."""

from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import anyio
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.workers import ProcessWorker

from exl2flow.flows.server.worker import submit_others


def entry(run: UUID) -> Any:
    return SimpleNamespace(flow_run=FlowRun(id=run, flow_id=uuid4()))


def test_run_that_the_worker_still_has_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessWorker, "_submit_scheduled_flow_runs", submit_others)
    worker = ProcessWorker(work_pool_name="none", limit=1)
    worker._has_successfully_synced = True
    held = uuid4()

    async def due() -> list[Any]:
        return [entry(held), entry(uuid4())]

    async def look() -> list[Any]:
        worker._limiter = anyio.CapacityLimiter(1)
        worker._limiter.acquire_on_behalf_of_nowait(held)
        return await worker.get_and_submit_flow_runs()

    monkeypatch.setattr(worker, "_get_scheduled_flow_runs", due)

    assert anyio.run(look) == []


def test_prefect_takes_such_a_run_again_and_ends() -> None:
    worker = ProcessWorker(work_pool_name="none", limit=1)
    held = uuid4()

    async def look() -> None:
        worker._limiter = anyio.CapacityLimiter(1)
        worker._limiter.acquire_on_behalf_of_nowait(held)
        await worker._submit_scheduled_flow_runs([entry(held)])

    with pytest.raises(RuntimeError, match="already holding"):
        anyio.run(look)
