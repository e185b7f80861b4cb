"""Tags of a run, by which lists of runs can be filtered in the UI."""

import logging
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext

from exl2flow.core.naming import model_name

log = logging.getLogger(__name__)


def tag_run(source: Path, *tags: str) -> None:
    """Tag the flow run that calls this with its model's name and more, at best effort.

    Only flow runs have tags: for each task with one, Prefect asks its server for a slot, and a
    server that is away would then stop the run.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    run, model = context.flow_run, model_name(source).partition("@")[0]
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(run.id, tags={*run.tags, model, *tags})
    except Exception as error:  # tags are a convenience
        log.warning("cannot tag the run, going on without: %s", error)
