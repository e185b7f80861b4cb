"""The Prefect API that a flow reports to: the configured one, or a temporary server of our own.

Prefect can start a temporary server itself, but stops it before the last events are stored and
leaves a traceback; this one is told to finish first, listens to the loopback interface only and
calls nobody.
"""

import http.client
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO

from prefect.client.orchestration import get_client
from prefect.events.worker import EventsWorker
from prefect.logging.configuration import ensure_logging_setup
from prefect.logging.handlers import APILogWorker, PrefectConsoleHandler
from prefect.settings import PREFECT_API_URL, temporary_settings

from exl2flow.core.errors import ServerFailed
from exl2flow.flows.server.temporary_process import FINISH

HOST = "127.0.0.1"
START_SECONDS = 180.0  # the first start creates the database: about 20 s on two cores
FLUSH_SECONDS = 10.0
STOP_SECONDS = 5.0  # to store what was received
QUIET_LOGGERS = (
    "exl2flow",
    "prefect.flow_runs",
    "prefect.task_runs",
    APILogWorker.__name__,
    EventsWorker.__name__,
)
SERVER_SETTINGS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    # What serves deployments, pauses, cancellations and limits is left to a server that stays.
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_CLEANUP_RECONCILER_ENABLED": "false",
}


class TemporaryServer:
    """A Prefect server in a child process, with a session of its own so that Ctrl-C misses it."""

    def __init__(self) -> None:
        """Start the process; `wait` returns once it answers."""
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `stop`
        self._answers = False
        with socket.create_server((HOST, 0)) as listener:
            self.url = f"http://{HOST}:{listener.getsockname()[1]}"
            handle = listener.fileno()
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "exl2flow.flows.server.temporary_process",
                    str(handle),
                ],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[handle],
                start_new_session=True,
                env={**os.environ, **SERVER_SETTINGS, "PREFECT_UI_API_URL": f"{self.url}/api"},
            )

    def wait(self) -> None:
        """Return when the server answers: the socket listens already, so one request suffices.

        Raises:
            ServerFailed: with the end of the server's output.
        """
        host, port = self.url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=START_SECONDS)
        try:
            connection.request("GET", "/api/health")
            status: object = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            status = error
        finally:
            connection.close()
        if status != http.client.OK:
            raise ServerFailed(
                f"the temporary Prefect server did not start ({status}): {self._output()}; "
                "set PREFECT_API_URL to a running server, or pass --no-prefect"
            )
        self._answers = True

    def _output(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"

    def stop(self) -> None:
        """End the server; one that was used may store what it received first."""
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(OSError, subprocess.TimeoutExpired):  # it may have ended before
            if self._answers:
                stdin.write(FINISH)
                stdin.flush()
                self._process.wait(timeout=STOP_SECONDS)
        with suppress(OSError):
            stdin.close()
        self._process.wait()
        self._log.close()


class Api:
    """Where a flow reports to; `wait` before the flow starts."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._server: TemporaryServer | None = None
        self.url = PREFECT_API_URL.value()
        if self.url is None:
            self._server = TemporaryServer()
            stack.callback(self._server.stop)
            self.url = f"{self._server.url}/api"

    @property
    def is_temporary(self) -> bool:
        """Tell whether the server was started here."""
        return self._server is not None

    @property
    def ui_url(self) -> str:
        """Address for a browser."""
        return str(self.url).removesuffix("/api")

    def wait(self) -> None:
        """Return when the API answers, and make Prefect use it until the block ends.

        Raises:
            ServerFailed: the configured API does not answer, or no temporary one could start.
        """
        if self._server is None:
            self._check()
            self._stack.enter_context(_quiet_console())
            return
        self._server.wait()
        self._stack.enter_context(_quiet_console())
        self._stack.enter_context(temporary_settings({PREFECT_API_URL: self.url}))
        self._stack.callback(flush)

    def _check(self) -> None:
        with get_client(sync_client=True) as client:
            error = client.api_healthcheck()
        if error is not None:
            raise ServerFailed(
                f"no Prefect API answers at `{self.url}` ({error}); start that server, unset "
                "PREFECT_API_URL to have a temporary one, or pass --no-prefect"
            )


@contextmanager
def api() -> Iterator[Api]:
    """Give a Prefect API for the block: the configured one, else a temporary server.

    The server starts in the background; call `wait` on the result before running a flow. From then
    on, log lines of runs go to the API only: whoever opens the block shows progress and errors.
    """
    with ExitStack() as stack:
        yield Api(stack)


@contextmanager
def _quiet_console() -> Iterator[None]:
    ensure_logging_setup()
    handlers = [h for h in logging.getLogger().handlers if isinstance(h, PrefectConsoleHandler)]
    for handler in handlers:
        handler.addFilter(_concerns_the_console)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_concerns_the_console)


def _concerns_the_console(record: logging.LogRecord) -> bool:
    """Pass warnings, but nothing of a run (its exceptions come with tracebacks) or of flushing."""
    return record.levelno >= logging.WARNING and not record.name.startswith(QUIET_LOGGERS)


def flush() -> None:
    """Send the log lines and events that Prefect still holds back."""
    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=FLUSH_SECONDS)
