"""Runs a flow for a command, on the configured Prefect server or a temporary one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from exl2flow.core.config import SharedOptions
from exl2flow.core.errors import HubError, PublicationDamaged, PublicationRefused
from exl2flow.flows.cli.console import say

if TYPE_CHECKING:
    from exl2flow.flows.server.temporary import Api

NOT_PUBLISHED = (PublicationRefused, PublicationDamaged, HubError)
ONLY_PUBLISHING = "all is converted, but not published; the same command does only the latter"


@contextmanager
def flow_server(*, wanted: bool) -> Iterator["Api | None"]:
    """Give the Prefect server for flows; a temporary one starts while the caller imports and plans.

    The console log of flows would repeat the progress and the errors that commands show.
    """
    if not wanted:
        yield None
        return
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    from exl2flow.flows.server.temporary import api

    with api() as server:
        yield server


def run_flow(server: "Api", name: str, config: SharedOptions) -> Any:
    """Return what a flow of `exl2flow.flows` returns."""
    from exl2flow import flows

    if server.is_temporary:
        say("starting a temporary Prefect server; PREFECT_API_URL names a lasting one")
    flow = getattr(flows, name)
    server.wait()
    say(f"this run in the Prefect UI: {server.ui_url}")
    return flow(config)
