"""Tags of a run, for filtering lists of runs in the UI."""

import logging
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext

from exl2flow.core.naming import model_name

log = logging.getLogger(__name__)


def tag_run(source: Path, *tags: str) -> None:
    """Tag the flow run that calls this with its model's name and more, at best effort.

    Only flow runs get tags: for each tagged task, Prefect requests a slot from its server, and an
    unreachable server would then stop the run.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    run, model = context.flow_run, model_name(source).partition("@")[0]
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(run.id, tags={*run.tags, model, *tags})
    except Exception as error:  # tags are a convenience
        log.warning("cannot tag the run, continuing without: %s", error)
