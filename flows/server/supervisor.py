"""The process behind `exl2flow server up`: starts server and workers, and again when they end.

It needs no Prefect. When it is killed, its services go on; the next one adopts them.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from exl2flow.core.errors import ServerFailed
from exl2flow.flows.server.services import (
    SERVER,
    SUPERVISOR,
    Home,
    Process,
    ServerSettings,
    answers,
    command,
    environment,
)

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0  # before a service that keeps ending is started again
STEADY_SECONDS = 60.0  # a service that ran that long begins anew with short pauses
LARGEST_LOG = 20 * 2**20  # bytes; a larger one is set aside when its service starts


class Supervisor:
    """Keeps the services of a home running."""

    def __init__(self, home: Home, settings: ServerSettings) -> None:
        self.home = home
        self.settings = settings
        self.processes = home.processes()
        self.processes[SUPERVISOR] = Process.of(os.getpid())
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self._is_saved = True

    def run(self, stop: threading.Event) -> None:
        """Keep all services running until asked to stop, then end them, workers first."""
        self._save()
        while True:
            self._keep(SERVER)
            if self.processes[SERVER].is_alive() and answers(self.settings):
                for worker in self.settings.workers:
                    self._keep(worker)
            if not self._is_saved:
                self._save()
            if stop.wait(LOOK_SECONDS):
                break
        self.home.end_services()
        self.processes = {}
        self._save()

    def _save(self) -> None:
        """Keep what runs; a full disk is told, and a reason to try again."""
        try:
            self.home.save_processes(self.processes)
        except OSError as error:
            self._is_saved = False
            log.warning("cannot write `services.json` (%s)", error.strerror)
        else:
            self._is_saved = True

    def _keep(self, name: str) -> None:
        child = self._children.get(name)
        if child is not None:
            child.poll()  # reaps it
        before = self.processes.get(name)
        if before is not None and before.is_alive():
            return
        exits = 0 if before is None else before.exits + 1
        now = time.monotonic()
        ran = now - self._started.get(name, -STEADY_SECONDS)
        pause = 0.0 if ran >= STEADY_SECONDS else self._pauses.get(name, 0.0)
        if ran < pause:
            return
        self._pauses[name] = min(max(2 * pause, LOOK_SECONDS), LONGEST_PAUSE_SECONDS)
        self._started[name] = now
        self._start(name, exits)

    def _start(self, name: str, exits: int) -> None:
        file = self.home.log(name)
        if file.exists() and file.stat().st_size > LARGEST_LOG:
            file.replace(file.with_suffix(".old.log"))
        with file.open("ab") as log:
            child = subprocess.Popen(
                command(self.settings, name),
                cwd=self.home.path,
                env=environment(self.home, self.settings, name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children[name] = child
        self.processes[name] = Process.of(child.pid, exits=exits)
        self._save()


def main() -> None:
    """Run the supervisor of the home named on the command line; a second one ends at once."""
    home = Home(Path(sys.argv[1]))
    settings = home.settings()
    if settings is None:
        raise ServerFailed(f"`{home.path}` holds no server; `exl2flow server up` makes one")
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    with home.lock() as is_ours:
        if is_ours:
            Supervisor(home, settings).run(stop)


if __name__ == "__main__":
    main()
