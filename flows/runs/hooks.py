"""A hook of all flows: a run that was interrupted ends as cancelled."""

from typing import Any

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelled

from exl2flow.core.errors import Interrupted


def cancelled_if_interrupted(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Mark a failed run as cancelled if a signal ended it."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, Interrupted):
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Cancelled(message=str(error)), force=True)
