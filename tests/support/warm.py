"""A warm interpreter: imports the program once, then forks a process per command.

Run as a script by `crash.py`. Each process is the program `exl2flow` from its `main` on, in a
session of its own; forking only saves the seconds that importing torch takes.

Requests are JSON datagrams on a socket: `{"start": [arguments], ...conditions}` with descriptors
for stdout and stderr attached, answered by the process id; `{"wait": pid}`, by the exit code.
"""

import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from typing import Any, NoReturn

import matplotlib.pyplot  # noqa: F401  # imported here so that no fork has to
import pandas  # noqa: F401  # as matplotlib

from exl2flow.cli.main import main
from exl2flow.core.store import store
from exl2flow.flows import run_locally  # noqa: F401  # as matplotlib
from exl2flow.pipeline.hub import client

MESSAGE_BYTES = 1 << 16
LIMIT_SECONDS = 120  # a process that hangs dies, and its exit code says so
DEFECT = 99


def slow_down(seconds: float) -> None:
    """Let every flush to disk take this long, as on a slow disk."""
    flush = os.fsync

    def slow_flush(descriptor: int) -> None:
        flush(descriptor)
        time.sleep(seconds)

    os.fsync = slow_flush  # type: ignore[assignment]  # the original takes file objects, too


def run(request: dict[str, Any], stdout: int, stderr: int) -> NoReturn:
    """Be the program: never returns."""
    os.setsid()
    signal.alarm(LIMIT_SECONDS)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    if (limit := request["file_limit"]) is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if (seconds := request["states_seconds"]) is not None:
        store.STATES_INTERVAL_SECONDS = seconds
    if (waits := request["hub_waits"]) is not None:
        opened = client.Hub.open
        client.Hub.open = staticmethod(  # type: ignore[method-assign]
            lambda token=None: replace(opened(token), waits=tuple(waits))
        )
    slow_down(request["flush_seconds"])
    sys.argv = ["exl2flow", *request["start"]]
    code = DEFECT
    try:
        main()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(channel: socket.socket) -> None:
    """Answer requests until the other end closes."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 2)
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                channel.close()
                run(request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(json.dumps(answer).encode())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
