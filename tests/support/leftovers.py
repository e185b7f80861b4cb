"""Ends what a test process leaves behind, because lasting servers survive whoever starts them.

Processes that carry a mark in their environment end with the process that made the mark, however it
ends: a watcher in a session of its own reads from a pipe that only that process holds open.

This file is also the watcher's program: `python leftovers.py NAME=VALUE`.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

VARIABLE = "EXL2FLOW_TEST_PROCESS"


@cache
def end_with_this_process() -> "subprocess.Popen[bytes]":
    """Mark all processes that this one starts from now on; return their watcher."""
    value = uuid4().hex
    watcher = subprocess.Popen(
        [sys.executable, "-I", __file__, f"{VARIABLE}={value}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # a watcher of this process, as of pytest's workers, must not end this watcher
        env={name: text for name, text in os.environ.items() if name != VARIABLE},
        start_new_session=True,
    )
    os.environ[VARIABLE] = value
    return watcher


def marked(mark: str) -> list[int]:
    """Return the ids of the processes that carry a mark; a zombie has no environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def watch(mark: str) -> None:
    """Kill all marked processes when the input ends."""
    sys.stdin.buffer.read()
    while found := marked(mark):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    watch(sys.argv[1])
