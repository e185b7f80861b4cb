"""A server of a model, in a process of its own, for as long as a command needs it."""

import os
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from exl2flow.cli.output.console import say
from exl2flow.core.errors import ServerFailed

HOST = "127.0.0.1"
PROGRAM = "exl2flow.cli.work.server_program"
READY = b"READY=1"  # of sd_notify(3)
STOP_SECONDS = 10.0  # between SIGTERM and SIGKILL
LOG_LINES = 15
ERROR = "error: "


@contextmanager
def serving(model: Path, port: int, options: Sequence[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a server of our own during the block, which begins when it is ready.

    It has a session of its own, so that Ctrl-C does not reach it, and ends with this process.

    Raises:
        ServerFailed: it did not start, with what it said.
    """
    address = ("--host", HOST, "--port", str(port), "--drain", "0")
    command = [sys.executable, "-P", "-m", PROGRAM, "serve", str(model), *address, *options]
    with (
        tempfile.NamedTemporaryFile(prefix="exl2flow-serve-", suffix=".log", delete=False) as log,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices,
    ):
        notices.bind("")  # Linux chooses a name, which begins with a zero byte
        name = notices.getsockname().decode().replace("\0", "@", 1)
        say(f"starting a server for `{model}`; its log is `{log.name}`", style="dim")
        process = subprocess.Popen(
            command,
            env=os.environ | {"NOTIFY_SOCKET": name},
            stdin=subprocess.PIPE,  # ends when this process does
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, notices, Path(log.name))
            notices.close()
            yield process
            if process.poll() is not None:
                say(f"warning: the server has ended; its log is `{log.name}`", style="yellow")
        finally:
            end(process)


def _wait_until_ready(
    process: "subprocess.Popen[bytes]", notices: socket.socket, log: Path
) -> None:
    """Return when the server says so.

    Raises:
        ServerFailed: it ended instead, with what it said.
    """
    ended = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as events:
            events.register(ended, selectors.EVENT_READ)
            events.register(notices, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in events.select()}
                if notices in ready and READY in notices.recv(4096).split(b"\n"):
                    return
                if ended in ready:
                    raise ServerFailed(f"{_reason(log)}; the server's log is `{log}`")
    finally:
        os.close(ended)


def _reason(log: Path) -> str:
    """Return why a server ended: its error, else its last lines."""
    text = log.read_text(encoding="utf-8", errors="replace")
    _, mark, error = text.rpartition(f"\n{ERROR}" if f"\n{ERROR}" in text else ERROR)
    return error.strip() if mark else "\n".join(text.splitlines()[-LOG_LINES:]).strip()


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that may have ended: by SIGTERM, then by SIGKILL."""
    process.terminate()
    if process.stdin is not None:
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
        return
    process.kill()
    process.wait()
