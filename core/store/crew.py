"""A crew: processes with a GPU each that work on a stage beside this one.

Each runs the same function of the stage with its own `WorkRanks`. What followers commit or note
goes to the manifest of this process, which is the only one that writes it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from exl2flow.core.errors import ConfigError, Exl2FlowError
from exl2flow.core.options.config import RunOptions
from exl2flow.core.runtime.progress import Tick
from exl2flow.core.runtime.ranks import WorkRanks
from exl2flow.core.runtime.team import BEAT, Team
from exl2flow.core.store.manifest import StageManifest
from exl2flow.core.store.told import record

log = logging.getLogger(__name__)
LESS = "repeat the command with fewer calibration rows, or on GPUs with more memory"


def places(gpus: str | None, device: str) -> list[str]:
    """Return the devices that share a run's work, as torch names them.

    Args:
        gpus: their number, `all`, or indexes with commas; None: the usual one.
        device: `cuda`, or `cpu`, on which ranks are given by number.

    Raises:
        ConfigError: one is not there, or is named twice; or they are of several kinds.
    """
    if gpus is None:
        return [device]
    if device == "cpu":
        if not gpus.isdecimal():
            raise ConfigError(f"`--gpus {gpus}`, and the run is on the CPU; leave it out")
        return [device] * int(gpus)
    seen = torch.cuda.device_count()
    chosen = range(seen if gpus == "all" else int(gpus)) if "," not in gpus else _indexes(gpus)
    if len({*chosen}) < len(chosen):
        raise ConfigError(f"`--gpus {gpus}` names a GPU twice")
    if absent := [index for index in chosen if index >= seen]:
        there = ", ".join(map(str, range(seen)))
        raise ConfigError(f"`--gpus {gpus}` needs GPU {absent[0]}, but torch sees {there}")
    kinds = {torch.cuda.get_device_name(index): index for index in chosen}
    if len(kinds) > 1:
        named = ", ".join(f"GPU {index} is a {name}" for name, index in kinds.items())
        raise ConfigError(f"`--gpus {gpus}`: {named}; results of two kinds differ, give one kind")
    return [f"cuda:{index}" for index in chosen]


def _indexes(gpus: str) -> list[int]:
    return [int(index) for index in gpus.split(",")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What a follower needs to work on a stage: `run` takes a `StageRun`."""

    run: Callable[[Any], object]
    config: RunOptions
    path: Path
    manifest: StageManifest
    inputs: Mapping[str, Path]
    keeps_states: bool


class Crew(Team[WorkRanks]):
    """The processes of all GPUs of a run but the first; see `core.store.crew_member`."""

    program, again = "exl2flow.core.store.crew_member", "repeat the command"
    remedy = LESS

    def __init__(self, places: Sequence[str], works: Sequence[Callable[..., Any]] = ()) -> None:
        """Start a process for each device but the first; this one need not wait for them.

        Args:
            places: the devices.
            works: functions that will be called, whose modules followers import meanwhile.
        """
        devices = [torch.device(place) for place in places]
        super().__init__(devices)
        self._ranks: WorkRanks | None = None
        self._used, self._known = self.use(), self.begin("know", works)

    def meet(self, method: str) -> WorkRanks:
        """See `Team`."""
        return WorkRanks.join(
            method, 0, len(self.devices), [str(device) for device in self.devices]
        )

    def work(self, errand: Errand, run: Any) -> None:
        """Work on a stage in all processes.

        Args:
            errand: for the followers.
            run: the `StageRun` of this process.

        Raises:
            Exl2FlowError: what this process raises; or a follower failed, or is lost.
        """
        self._together(
            "work", (errand,), lambda ranks: errand.run(replace(run, ranks=ranks)), heard_by=run
        )

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in all processes; return what it returns in this one.

        Args:
            function: of a module; takes `ranks`, too, by name.
            args: for all processes.
            kwargs: for this one.

        Raises:
            Exl2FlowError: see `work`.
        """
        return self._together(
            "call", (function, args), lambda ranks: function(*args, ranks=ranks, **kwargs)
        )

    def _together(
        self, name: str, args: Any, own: Callable[[WorkRanks], Any], heard_by: Any = None
    ) -> Any:
        """Let followers call a method, and return what this process makes meanwhile."""
        done = SimpleQueue[int]()
        in_run = copy_context().run  # which log lines of the thread that hears belong to
        self.hear(lambda rank, kind, content: in_run(_hear, heard_by, done, rank, kind, content))
        if self._ranks is None:
            self._used()
            self._known()
            self._ranks = self.join()
        self.tell(0, name, args, {}, wants_answer=False)
        try:
            result = own(self._ranks)
            self._wait_for(done)
        except RuntimeError as error:  # torch's, of an exchange or of this process alone
            raise self.lost(error) from error
        return result

    def _wait_for(self, done: "SimpleQueue[int]") -> None:
        """Wait until all followers are done, and all that they told is recorded."""
        left = {*range(1, len(self.devices))}
        while left:
            with suppress(Empty):
                left.discard(done.get(timeout=BEAT))
            self.check()


def _hear(run: Any, done: "SimpleQueue[int]", rank: int, kind: str, content: Any) -> None:
    """Record what a follower tells; the last word is that it is done."""
    if kind == "done":
        done.put(rank)
    elif kind == "warning":
        name, text = content
        logging.getLogger(name).warning("%s", text)
    elif kind == "tick":
        manifest, tick = run.folder.manifest, content
        assert isinstance(tick, Tick)
        run.tick(manifest.cursor, manifest.total, tick.detail)
    elif not record(run.folder, kind, content):
        raise Exl2FlowError(f"rank {rank} told `{kind}`, which nobody expects; report this")
    elif kind == "commit":
        log.info("rank=%d committed %s", rank, content[0])
