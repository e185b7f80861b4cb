"""When a task is tried again: only after errors that can pass."""

from typing import Any

from prefect import Task
from prefect.client.schemas import TaskRun
from prefect.client.schemas.objects import State

from exl2flow.core.errors import Exl2FlowError

RETRY_DELAYS_SECONDS = [10.0, 60.0, 300.0]


def is_retryable(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Tell Prefect whether another attempt can succeed."""
    return isinstance(state.data, Exl2FlowError) and state.data.retryable
