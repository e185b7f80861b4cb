"""How a command runs: on which Prefect server, and from which checkpoints."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from exl2flow.core.errors import HubError, PublicationDamaged, PublicationRefused, ServerFailed
from exl2flow.core.options.config import RunOptions
from exl2flow.flows.cli.console import say

if TYPE_CHECKING:
    from exl2flow.core.store.stage import Pipeline
    from exl2flow.flows.runs.preparation import Prepared
    from exl2flow.flows.server.temporary import Api

Config = TypeVar("Config", bound=RunOptions)

NOT_PUBLISHED = (PublicationRefused, PublicationDamaged, HubError)
ONLY_PUBLISHING = "converted but not published; repeat the command to publish"


@contextmanager
def flow_server(*, wanted: bool) -> Iterator["Api | None"]:
    """Yield the Prefect server for flows; a temporary one starts while the caller plans.

    Flows log warnings to the API only: commands show progress and errors themselves.
    """
    if not wanted:
        yield None
        return
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    from exl2flow.flows.server.temporary import api

    with api() as server:
        yield server


def run_flow(
    server: "Api | None",
    name: str,
    prepared: "Prepared[Config]",
    *,
    otherwise: Callable[[Config], Any],
) -> Any:
    """Return what a flow of `exl2flow.flows` returns; its checks were made and are not repeated.

    Args:
        server: where the flow reports to; None runs `otherwise` in its place.
        name: of the flow.
        prepared: the flow's checked configuration.
        otherwise: the same without Prefect.

    Raises:
        ServerFailed: the server does not answer, or ended meanwhile and did not come back.
    """
    from exl2flow.flows.runs.preparation import reuse_checks

    if server is None:
        with reuse_checks(prepared):
            return otherwise(prepared.config)
    from httpx import TransportError

    from exl2flow import flows

    if server.is_temporary:
        say("starting a temporary Prefect server; set PREFECT_API_URL to use a lasting one")
    run = getattr(flows, name)
    server.wait()
    say(f"this run in the Prefect UI: {server.ui_url}")
    try:
        with reuse_checks(prepared):
            return run(prepared.config)
    except TransportError as error:
        raise ServerFailed(
            f"the Prefect API at `{server.url}` no longer answers ({error}); finished work is "
            "saved: repeat the command to resume, or pass --no-prefect"
        ) from error


def forget(pipeline: "Pipeline") -> None:
    """Delete the stage folders of this configuration; those of other options stay.

    Raises:
        WorkDirBusy: another process uses them.
    """
    with pipeline.work.lock():
        for name in pipeline.refs:
            shutil.rmtree(pipeline.path(name), ignore_errors=True)
