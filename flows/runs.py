"""What all flows share: log lines on the run's page, and how a run ends that was asked to stop."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.logging.handlers import APILogHandler
from prefect.states import Cancelled

from exl2flow.core.errors import Interrupted


@contextmanager
def logged() -> Iterator[None]:
    """Send our log lines to the run's page while the block runs."""
    logger = logging.getLogger("exl2flow")
    if any(isinstance(handler, APILogHandler) for handler in logger.handlers):
        yield  # Prefect's own setting `extra_loggers` names us
        return
    level, handler = logger.level, APILogHandler()
    logger.addHandler(handler)
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def cancelled_if_interrupted(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook on failure: a run that a signal ended is cancelled, not failed."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, Interrupted):
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Cancelled(message=str(error)), force=True)
