"""Tags of a run, which filter lists of runs in the UI."""

import logging
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext

from exl2flow.core.options.naming import model_name

log = logging.getLogger(__name__)


def tag_run(source: Path, *tags: str) -> None:
    """Tag the calling flow run with its model's name and more, on a best-effort basis.

    Only flow runs are tagged: for each tagged task Prefect asks its server for a slot, so a server
    that is down would stop the run.
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
