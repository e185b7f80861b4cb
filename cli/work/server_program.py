"""The server behind a command: the program `exl2flow`, which ends with whoever started it.

Its standard input is a pipe from that process; the end of the pipe means that the process has
ended, however it did, and ends this one at once.
"""

import os
import threading

from exl2flow.cli.main import main


def _follow_parent() -> None:
    while os.read(0, 1):  # not through `sys.stdin`, whose lock would be held at exit
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_follow_parent, daemon=True).start()
    main()
