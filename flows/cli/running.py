"""The server that runs a command's flow; a temporary one starts while torch is imported."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from exl2flow import flows
from exl2flow.cli.output.console import say
from exl2flow.core.errors import ServerFailed
from exl2flow.core.options.config import RunOptions

if TYPE_CHECKING:  # it imports torch
    from exl2flow.pipeline.run import Prepared


@contextmanager
def on_server(name: str) -> Iterator[Callable[["Prepared[RunOptions]"], Any]]:
    """Yield a flow of `exl2flow.flows` with its server; a temporary one starts meanwhile.

    Flows log warnings to the API only: commands show progress and errors themselves.

    Raises:
        ServerFailed: the server does not answer, or ended meanwhile and did not come back.
    """
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    from httpx import TransportError

    from exl2flow.flows.server.temporary import api

    with api() as server:

        def run(prepared: "Prepared[RunOptions]") -> Any:
            from exl2flow.pipeline.preparation import reuse_checks

            if server.is_temporary:
                from exl2flow.pipeline.local import HERE, RUNS, carry_out, is_finished

                kind = RUNS[name]
                if is_finished(kind, prepared):  # a server for nothing would take half a minute
                    return carry_out(kind, prepared, HERE)
                say("starting a temporary Prefect server; set PREFECT_API_URL to use a lasting one")
            flow = getattr(flows, name)
            server.wait()
            say(f"this run in the Prefect UI: {server.ui_url}")
            try:
                with reuse_checks(prepared):
                    return flow(prepared.config)
            except TransportError as error:
                raise ServerFailed(
                    f"the Prefect API at `{server.url}` no longer answers ({error}); finished work "
                    "is saved: repeat the command to resume, or pass --no-prefect"
                ) from error

        yield run
