"""A follower that does little: `python -m toy_follower RANK FD PID`."""

import os
import sys
from typing import Any

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.runtime.following import Follower, main


class ToyFollower(Follower):
    """Answers, tells, fails and ends on demand."""

    remedy = "ask for less"

    def twice(self, x: int) -> tuple[int, int]:
        return self.rank, 2 * x

    def say(self, words: Any) -> None:
        self.channel.send("said", words)

    def refuse(self) -> None:
        raise ConfigError("not this")

    def stumble(self) -> None:
        raise KeyError("what")

    def exhaust(self) -> None:
        raise torch.OutOfMemoryError("full")

    def end(self) -> None:
        os._exit(3)


if __name__ == "__main__":
    main(ToyFollower, sys.argv[1:])
