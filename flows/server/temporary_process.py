"""The process of the temporary Prefect server; `temporary.py` starts it.

Its standard input is a pipe from the process that started it. A byte asks it to finish; the end of
the pipe means that the other process has ended, and ends this one at once.
"""

import os
import socket
import sys
import threading

import uvicorn

FINISH = b"\n"
NICENESS = 10


def _follow_parent(server: uvicorn.Server) -> None:
    if sys.stdin.buffer.read(len(FINISH)) == FINISH:
        server.should_exit = True
        sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Serve Prefect's API and UI on an inherited listening socket.

    If all cores are busy, a thread that waits for this process holds up all the others.
    """
    os.nice(NICENESS)
    config = uvicorn.Config(
        "exl2flow.flows.server.application:create_app",
        factory=True,
        log_level="error",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    threading.Thread(target=_follow_parent, args=(server,), daemon=True).start()
    server.run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
    os._exit(0)  # everything is stored; a normal exit takes 2 s and waits for the thread


if __name__ == "__main__":
    main()
