"""The Prefect API that a flow reports to: the configured one, or a temporary server of our own.

Prefect can start a temporary server itself, but stops it before the last events are stored and
leaves a traceback. This one finishes first, listens on the loopback interface only,
contacts nobody, and refuses requests from other web pages. `EventsWorker.drain_all` has no public
equivalent; upstream: https://github.com/PrefectHQ/prefect/issues/15999
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.worker import EventsWorker
from prefect.exceptions import PrefectHTTPStatusError
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from exl2flow.core.errors import ServerFailed
from exl2flow.flows.server.services import MODULES, QUIET_ENVIRONMENT, answers

HOST = "127.0.0.1"
WARNING = re.compile(r"^\S+:\d+: \w*Warning: ")
ERROR = re.compile(r"^[\w.]*(Error|Exception|Exit|Interrupt)\b|^(ERROR|CRITICAL)\b")
START_SECONDS = 180.0  # the first start creates the database: about 20 s on two cores
FLUSH_SECONDS = 10.0
STOP_SECONDS = 5.0  # to store what was received
# Services for deployments, pauses, cancellations and limits, which only a lasting server needs.
IDLE_SERVICES = (
    "SCHEDULER",
    "LATE_RUNS",
    "FOREMAN",
    "TRIGGERS",
    "CANCELLATION_CLEANUP",
    "PAUSE_EXPIRATIONS",
    "REPOSSESSOR",
    "CLEANUP_RECONCILER",
)
SERVER_SETTINGS = {
    **QUIET_ENVIRONMENT,
    # Browsers send some requests of other web pages without asking for permission first.
    "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
    **{f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in IDLE_SERVICES},
}


class Api:
    """The Prefect API that a flow reports to; call `wait` before the flow starts."""

    is_temporary = False

    def __init__(self, url: str) -> None:
        self.url = url  # as in PREFECT_API_URL

    @property
    def ui_url(self) -> str:
        """Address for a browser."""
        return self.url.removesuffix("/api")

    def wait(self) -> None:
        """Return when the API answers.

        Raises:
            ServerFailed: the configured API cannot be used, or no temporary one could start.
        """
        with get_client(sync_client=True) as client:
            check(client, "unset PREFECT_API_URL for a temporary one, or pass --no-prefect")


class TemporaryServer(Api):
    """A Prefect server in a child process, in its own session so that Ctrl-C does not reach it."""

    is_temporary = True

    def __init__(self) -> None:
        """Start the process; `wait` returns once it answers."""
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `stop`
        self._answers = False
        with socket.create_server((HOST, 0)) as listener:
            super().__init__(f"http://{HOST}:{listener.getsockname()[1]}/api")
            handle = listener.fileno()
            own = {
                "PREFECT_UI_API_URL": self.url,
                "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": self.ui_url,
            }
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{MODULES}temporary_process", str(handle)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[handle],
                start_new_session=True,
                env={**os.environ, **SERVER_SETTINGS, **own},
            )

    def wait(self) -> None:
        """See `Api`; the socket already listens, so one request suffices."""
        check_home(PREFECT_HOME.value())
        self._answers = answers(self.url, START_SECONDS)
        if not self._answers:
            self._log.seek(0)
            reason = end_reason(self._log.read().decode(errors="replace"))
            raise ServerFailed(
                f"the temporary Prefect server did not start: {reason}; set PREFECT_API_URL to a "
                "running server, or pass --no-prefect"
            )

    def stop(self) -> None:
        """End the server; one that was used stores what it received first."""
        with self._log, self._process:  # which closes the pipe and waits for the process
            if self._answers:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=STOP_SECONDS)


def check_home(home: Path) -> None:
    """Check that Prefect can write to its home; it only warns if not, and fails later.

    Raises:
        ServerFailed: it cannot.
    """
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        raise ServerFailed(
            f"Prefect cannot write to its home `{home}` ({error.strerror}); set PREFECT_HOME to a "
            "folder that you can write to, or pass --no-prefect"
        ) from error


def end_reason(log: str) -> str:
    """Return the line of a server's log that says why it ended: its last error, else its last line.

    A warning of Python takes two lines, and the second is source code.
    """
    lines = log.strip().splitlines()
    plain = [line for line in lines if line == line.lstrip() and not WARNING.search(line)]
    errors = [line for line in plain if ERROR.search(line)]
    return (errors or plain or lines or ["no output"])[-1].strip()


def check(client: SyncPrefectClient, otherwise: str) -> None:
    """Check that an API can be used.

    Raises:
        ServerFailed: it cannot; the message ends with `otherwise`, what else the user can do.
    """
    if (error := client.api_healthcheck()) is not None:
        raise ServerFailed(
            f"no Prefect API answers at `{client.api_url}` ({error}); start that server, "
            f"{otherwise}"
        )
    try:
        client.hello()
    except PrefectHTTPStatusError as refused:
        raise ServerFailed(
            f"the Prefect API at `{client.api_url}` refuses the password "
            f"(HTTP {refused.response.status_code}); set PREFECT_API_AUTH_STRING "
            f"to what `exl2flow server password` prints, {otherwise}"
        ) from None


@contextmanager
def api() -> Iterator[Api]:
    """Make Prefect use an API for the block: the configured one, or a temporary server.

    The server starts in the background; call `wait` on the result before running a flow.
    """
    if (configured := PREFECT_API_URL.value()) is not None:
        yield Api(configured)
        return
    server = TemporaryServer()
    with temporary_settings({PREFECT_API_URL: server.url}):
        try:
            yield server
        finally:
            for worker in (APILogWorker, EventsWorker):  # what Prefect still queues
                worker.drain_all(timeout=FLUSH_SECONDS)
            server.stop()
