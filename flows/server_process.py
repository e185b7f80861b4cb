"""The process of the temporary Prefect server; `server.py` starts it.

It ends when its standard input does, so it cannot outlive the process that started it, however that
one ends, nor is it tied to a thread of it.
"""

import os
import socket
import sys
import threading
import time

import uvicorn

GRACE_SECONDS = 5.0  # to store what was received before the process goes


def _follow_parent(server: uvicorn.Server) -> None:
    sys.stdin.buffer.read()
    server.should_exit = True
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def main() -> None:
    """Serve Prefect's API and UI on a listening socket that was inherited."""
    config = uvicorn.Config(
        "prefect.server.api.server:create_app",
        factory=True,
        log_level="error",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    threading.Thread(target=_follow_parent, args=(server,), daemon=True).start()
    server.run(sockets=[socket.socket(fileno=int(sys.argv[1]))])


if __name__ == "__main__":
    main()
