"""Progress of stages: bars with elapsed and remaining time on a terminal, else plain lines."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

from exl2flow.cli.output.console import ERR, say
from exl2flow.core.runtime.pace import Pace, clock
from exl2flow.core.runtime.progress import Progress, Tick, reporting_to
from exl2flow.core.words import short

PAUSE_SECONDS = 1.0  # between two lines, except the first and the last of a stage


class PlainLines:
    """Lines on stderr: the begin and the end of each stage, and at most one step per second."""

    def __init__(self) -> None:
        self._paces: dict[str, Pace] = {}
        self._printed: dict[str, Tick] = {}  # the newest line of each stage
        self._time = -PAUSE_SECONDS

    def __call__(self, tick: Tick) -> None:
        """See `Progress`."""
        now = time.monotonic()
        pace = self._paces.setdefault(tick.stage, Pace.start(tick, now))
        pace.update(tick, now)
        before = self._printed.get(tick.stage)
        if before is not None:
            is_end = before.done < tick.total <= tick.done
            if not is_end and (tick == before or now - self._time < PAUSE_SECONDS):
                return
        self._printed[tick.stage], self._time = tick, now
        words = [tick.stage, f"{tick.done}/{tick.total}", tick.detail]
        words += [f"{what}={time}" for what, time in pace.times(now).items()]
        say(" ".join(filter(None, words)))


class _Times(ProgressColumn):
    """Elapsed and remaining time; the latter counts down between ticks."""

    def render(self, task: Task) -> Text:
        """See `ProgressColumn`."""
        pace: Pace = task.fields["pace"]
        now = time.monotonic()
        elapsed = clock(pace.elapsed(now))
        if pace.done >= pace.total:
            return Text(elapsed if pace.has_moved else "", style="green")
        return Text(f"{elapsed}  ETA {clock(pace.remaining(now))}", style="cyan")


COLUMNS = (
    SpinnerColumn(),
    TextColumn("{task.description:<9}"),
    BarColumn(bar_width=24),
    MofNCompleteColumn(),
    _Times(),
    TextColumn("{task.fields[detail]}", style="dim", markup=False),
)


class StageBars:
    """One bar per stage."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._stages: dict[str, tuple[TaskID, Pace]] = {}

    def __call__(self, tick: Tick) -> None:
        """See `Progress`."""
        now = time.monotonic()
        if tick.stage not in self._stages:
            pace = Pace.start(tick, now)
            task = self._bars.add_task(tick.stage, total=tick.total, pace=pace, detail="")
            self._stages[tick.stage] = (task, pace)
        task, pace = self._stages[tick.stage]
        pace.update(tick, now)
        self._bars.update(task, completed=tick.done, total=tick.total, detail=short(tick.detail))


@contextmanager
def shown(*, plain: bool) -> Iterator[Progress]:
    """Show the progress of everything that runs inside the block, and yield the sink.

    Args:
        plain: print lines even on a terminal.
    """
    if plain or not ERR.is_terminal:
        lines = PlainLines()
        with reporting_to(lines):
            yield lines
        return
    with (
        Bars(*COLUMNS, console=ERR, refresh_per_second=4) as bars,
        reporting_to(sink := StageBars(bars)),
    ):
        yield sink
