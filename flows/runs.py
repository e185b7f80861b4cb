"""What all flows share: how a run ends that was asked to stop."""

from typing import Any

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelled

from exl2flow.core.errors import Interrupted


def cancelled_if_interrupted(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook on failure: a run that a signal ended is cancelled, not failed."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, Interrupted):
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Cancelled(message=str(error)), force=True)
