"""When Prefect retries a task: only after transient errors."""

from typing import Any

from prefect import Task
from prefect.client.schemas import TaskRun
from prefect.client.schemas.objects import State

from exl2flow.core.errors import Exl2FlowError

DELAYS_SECONDS = [10.0, 60.0, 300.0]


def is_retryable(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Return whether a retry can succeed; Prefect calls this."""
    return isinstance(state.data, Exl2FlowError) and state.data.retryable


# Keyword arguments of `prefect.task`
RETRIED: dict[str, Any] = {
    "retries": len(DELAYS_SECONDS),
    "retry_delay_seconds": DELAYS_SECONDS,
    "retry_condition_fn": is_retryable,
}
