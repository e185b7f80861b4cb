"""Runs a flow for a command, on the configured Prefect server or a temporary one."""

import os
from typing import Any

from exl2flow.core.config import SharedOptions
from exl2flow.core.errors import HubError, PublicationDamaged, PublicationRefused
from exl2flow.flows.cli.console import say

NOT_PUBLISHED = (PublicationRefused, PublicationDamaged, HubError)
ONLY_PUBLISHING = "all is converted, but not published; the same command does only the latter"


def run_flow(name: str, config: SharedOptions) -> Any:
    """Return what a flow of `exl2flow.flows` returns.

    Its own console log would repeat the progress that commands show.
    """
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "ERROR")
    from exl2flow import flows
    from exl2flow.flows.server import api

    with api() as server:
        if server.is_temporary:
            say("starting a temporary Prefect server; PREFECT_API_URL names a lasting one")
        flow = getattr(flows, name)
        server.wait()
        say(f"this run in the Prefect UI: {server.ui_url}")
        return flow(config)
