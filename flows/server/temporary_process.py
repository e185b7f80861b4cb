"""The process of the temporary Prefect server; `temporary.py` starts it and ends it by SIGTERM.

Its standard input is a pipe from the process that started it; the end of the pipe means that the
other process has ended, and ends this one at once.
"""

import os
import socket
import sys
import threading

import uvicorn

NICENESS = 10


def _follow_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    os.nice(NICENESS)  # if all cores are busy, a thread that waits holds up all the others
    config = uvicorn.Config(
        "exl2flow.flows.server.application:create_app",
        factory=True,
        log_level="error",
        timeout_graceful_shutdown=1,
    )
    threading.Thread(target=_follow_parent, daemon=True).start()
    uvicorn.Server(config).run([socket.socket(fileno=int(sys.argv[1]))])
