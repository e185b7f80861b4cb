"""The process behind `exl2flow server up`: starts the server and its workers, and restarts them.

It does not load Prefect. If it is killed, its services go on; the next one adopts them.
"""

import sys
import time
from pathlib import Path

from exl2flow.flows.server.services import SERVER, Home, ServerSettings, answers, is_alive

LOOK_SECONDS = 1.0
PAUSE_SECONDS = 10.0  # at least, between two starts of a service


class Supervisor:
    """Keeps the services of a home running, those included that it did not start."""

    def __init__(self, home: Home, settings: ServerSettings) -> None:
        self.home = home
        self.settings = settings
        self.services = home.processes()
        self._started: dict[str, float] = {}

    def keep(self, name: str) -> None:
        """Start a service if it does not run and was not started just before."""
        now = time.monotonic()
        found = self.services.get(name)
        is_recent = now - self._started.get(name, -PAUSE_SECONDS) < PAUSE_SECONDS
        if is_recent or (found is not None and is_alive(found)):
            return
        self._started[name] = now
        self.services[name] = self.home.start(self.settings, name)

    def run(self) -> None:
        """Keep all services running; return only if the server ends before it ever answered."""
        has_answered = False
        while True:
            self.keep(SERVER)
            if answers(self.settings):
                has_answered = True
                for worker in self.settings.workers:
                    self.keep(worker)
            elif not (has_answered or is_alive(self.services[SERVER])):
                return
            time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    home = Home(Path(sys.argv[1]))
    Supervisor(home, home.started()).run()
