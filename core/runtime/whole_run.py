"""Progress of a whole run: how many stages are done, which one is at work, when that ends."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from exl2flow.core.runtime.pace import Pace, time_of_day
from exl2flow.core.runtime.progress import Tick, current, reporting_to

log = logging.getLogger(__name__)

LOG_SECONDS = 10.0  # between two lines within a stage


class WholeRun:
    """Ticks of all stages as one share and one line of words.

    A stage of one of several models is named `LABEL STAGE`, as `labelled` names it.
    """

    def __init__(self, output: str) -> None:
        """Begin; `output` says for people where the result goes."""
        self.stages: Sequence[str] = ()
        self._output = output
        self._done: set[str] = set()
        self._paces: dict[str, Pace] = {}
        self._newest: Tick | None = None

    def expect(self, stages: Sequence[str]) -> None:
        """Take the names of all stages in their order, once they are known."""
        self.stages = stages

    def update(self, tick: Tick, now: float) -> None:
        """Take the next tick; stages that come before its stage are done."""
        if tick.stage not in self._paces:
            self._paces[tick.stage] = Pace.start(tick, now)
            self._done.update(self._before(tick.stage))
        self._paces[tick.stage].update(tick, now)
        self._newest = tick
        if tick.done >= tick.total:
            self._done.add(tick.stage)

    def _before(self, stage: str) -> list[str]:
        if stage not in self.stages:
            return []
        model = _model(stage)
        earlier = self.stages[: self.stages.index(stage)]
        return [name for name in earlier if not model or _model(name) in ("", model)]

    @property
    def share(self) -> float:
        """Fraction of all stages that is done; a stage in progress counts in part."""
        if not self.stages:
            return 0.0
        return sum(map(self._part, self.stages)) / len(self.stages)

    def _part(self, name: str) -> float:
        """Return the share of one stage that is done."""
        pace = self._paces.get(name)
        if name in self._done:
            return 1.0
        return 0.0 if pace is None else pace.done / max(pace.total, 1)

    def words(self, now: float) -> str:
        """Return the stage of stages, its step of steps, when it ends, and the output."""
        return f"{self.position(now)} · output {self._output}"

    def position(self, now: float) -> str:
        """Return the stage of stages, its step of steps and when it ends."""
        tick = self._newest
        if tick is None:
            return f"stage 1 of {len(self.stages)} begins" if self.stages else "checks before work"
        words = [tick.stage]
        if tick.stage in self.stages:
            number = len(self._done.intersection(self.stages)) + (tick.stage not in self._done)
            words.insert(0, f"stage {number} of {len(self.stages)}")
        if tick.total > 1:
            words.append(f"{tick.done} of {tick.total}")
        if left := self._paces[tick.stage].remaining(now):
            words.append(f"ends about {time_of_day(left)}")
        return ", ".join(words)

    def ended(self, how: str) -> str:
        """Return the words for a run that has ended, `how` first, because lists cut the rest."""
        return f"{how} · output {self._output}"


def _model(stage: str) -> str:
    return stage.rpartition(" ")[0]


class Watcher:
    """Shows how far a run is, here nowhere; subclasses say where."""

    def __init__(self, run: WholeRun) -> None:
        self.run = run

    def expect(self, stages: Sequence[str]) -> None:
        """Take the names of all stages in their order."""
        self.run.expect(stages)

    def finish(self, result: object) -> None:
        """Take the result of the run, which says in a line what it is."""


class LoggingWatcher(Watcher):
    """Logs how far a run is, for programs that show log lines of level INFO."""

    def __init__(self, run: WholeRun) -> None:
        super().__init__(run)
        self._logged = ""  # the stage of the newest line
        self._time = 0.0

    def tick(self, tick: Tick) -> None:
        """Log a tick, unless it is in the middle of a stage and the last line is recent."""
        now = time.monotonic()
        self.run.update(tick, now)
        is_inside = tick.stage == self._logged and tick.done < tick.total
        if is_inside and now - self._time < LOG_SECONDS:
            return
        self._logged, self._time = tick.stage, now
        log.info("%s", self.run.position(now))

    def finish(self, result: object) -> None:
        """See `Watcher`."""
        log.info("done: %s", result)


@contextmanager
def logging_progress(output: str) -> Iterator[LoggingWatcher]:
    """Log how far the run inside the block is; other listeners hear its ticks as well."""
    watcher, listener = LoggingWatcher(WholeRun(output)), current()

    def sink(tick: Tick) -> None:
        listener(tick)
        watcher.tick(tick)

    with reporting_to(sink):
        yield watcher
