"""A member of a crew: `python -m exl2flow.core.store.crew_member RANK FD PID`."""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from exl2flow.core.runtime.following import Channel, Follower, main
from exl2flow.core.runtime.interrupt import StopRequest
from exl2flow.core.runtime.ranks import WorkRanks
from exl2flow.core.store.crew import LESS, Errand
from exl2flow.core.store.stage import StageRun
from exl2flow.core.store.told import ToldFolder


class ToldWarnings(logging.Handler):
    """Tells rank 0 of warnings, which shows them where its own go."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self._channel.send("warning", (record.name, record.getMessage()))


class Member(Follower):
    """Works on a stage when rank 0 tells it to."""

    remedy = LESS

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._places: Sequence[str] = ()
        self._ranks: WorkRanks | None = None

    def use(self, devices: Sequence[str]) -> None:
        """See `Follower`."""
        logging.getLogger().addHandler(ToldWarnings(self.channel))
        super().use(devices)
        self._places = devices

    def know(self, works: Sequence[Callable[..., Any]]) -> None:
        """Have imported the modules of functions that will be called."""

    def join(self, method: str, count: int) -> None:
        """Meet the others."""
        self._met = self._ranks = WorkRanks.join(method, self.rank, count, self._places)

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        """Call a function; its result is that of rank 0."""
        function(*args, ranks=self._ranks)
        self.channel.send("done")

    def work(self, errand: Errand) -> None:
        """Work on a stage."""
        assert self._ranks is not None
        torch.cuda.empty_cache()  # of what earlier stages needed
        folder = ToldFolder(errand.path, errand.manifest, self.channel.send)
        errand.run(
            StageRun(
                config=errand.config,
                folder=folder,
                inputs=errand.inputs,
                device=self._places[self.rank],
                progress=folder.tick,
                stop=StopRequest(),
                ranks=self._ranks,
                keeps_states=errand.keeps_states,
            )
        )
        self.channel.send("done")


if __name__ == "__main__":
    main(Member, sys.argv[1:])
