"""Reads what a Prefect server knows of a flow run."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import Artifact, Log
from prefect.client.schemas.sorting import ArtifactSort

from exl2flow.core.options.sweep import SweepConfig

SETTLE_SECONDS = 20.0  # task states and log lines reach the database a while after the run


@dataclass(frozen=True)
class Swept:
    """A sweep by the flow, and the id of its run."""

    config: SweepConfig
    run: UUID


def run_name(run: UUID) -> str:
    """Return the name of a flow run."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run).name


def run_state(run: UUID) -> str:
    """Return the name of a flow run's state."""
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run).state
    return state.name if state is not None else "none"


def run_message(run: UUID) -> str:
    """Return the message of a flow run's state."""
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run).state
    return str(state and state.message)


def run_count(run: UUID) -> int:
    """Return how often a flow run began."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run).run_count


def task_states(run: UUID) -> dict[str, str]:
    """Return task name → state name of a finished flow run."""
    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[run]))

    def read() -> dict[str, str]:
        with get_client(sync_client=True) as client:
            tasks = client.read_task_runs(flow_run_filter=chosen)
        return {task.name: task.state.name for task in tasks if task.state}

    open_states = {"Pending", "Running"}
    return settled(read, lambda states: bool(states) and not open_states & set(states.values()))


def artifacts(run: UUID) -> dict[str, Artifact]:
    """Return key → newest artifact of a flow run."""
    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=chosen, sort=ArtifactSort.CREATED_DESC)
    return {str(artifact.key): artifact for artifact in reversed(found)}


def log_lines(run: UUID) -> list[Log]:
    """Return the log of a finished flow run."""
    chosen = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))

    def read() -> list[Log]:
        with get_client(sync_client=True) as client:
            return client.read_logs(log_filter=chosen)

    def is_whole(logs: list[Log]) -> bool:  # tasks finish, too
        return any("Finished in state" in log.message and not log.task_run_id for log in logs)

    return settled(read, is_whole)


def settled(read: Callable[[], Any], is_settled: Callable[[Any], bool]) -> Any:
    """Read until the result is settled, or for as long as that may take."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not is_settled(value := read()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return value
