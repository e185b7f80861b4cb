"""Speed and remaining time of a stage, for the command line and the Prefect pages alike."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from exl2flow.core.runtime.progress import Tick

UNKNOWN_TIME = "-:--:--"
DATED_SECONDS = 12 * 3600  # from then on the hour alone could be today's or tomorrow's


@dataclass(slots=True)
class Pace:
    """Speed of a stage since its first tick; work found done by a resume does not count."""

    started: float
    resumed: int
    done: int
    total: int
    changed: float

    @classmethod
    def start(cls, tick: Tick, now: float) -> "Pace":
        """Start at the first tick."""
        return cls(started=now, resumed=tick.done, done=tick.done, total=tick.total, changed=now)

    def update(self, tick: Tick, now: float) -> None:
        """Take the next tick."""
        self.done, self.total, self.changed = tick.done, tick.total, now

    @property
    def has_moved(self) -> bool:
        """Return whether anything was done since the first tick."""
        return self.done > self.resumed

    def elapsed(self, now: float) -> float:
        """Return the seconds since the first tick; constant once the stage is finished."""
        return (self.changed if self.done >= self.total else now) - self.started

    def remaining(self, now: float) -> float | None:
        """Return the seconds left, None until something was done."""
        if self.done >= self.total:
            return 0.0
        if not self.has_moved:
            return None
        seconds = (self.changed - self.started) / (self.done - self.resumed)
        return max(0.0, seconds * (self.total - self.done) - (now - self.changed))

    def times(self, now: float) -> dict[str, str]:
        """Return `elapsed` and `remaining` as h:mm:ss; nothing before the first unit is done."""
        if not self.has_moved:
            return {}
        known = {"elapsed": clock(self.elapsed(now))}
        if self.done < self.total:
            known["remaining"] = clock(self.remaining(now))
        return known


def clock(seconds: float | None) -> str:
    """Return h:mm:ss."""
    return UNKNOWN_TIME if seconds is None else str(timedelta(seconds=round(seconds)))


def time_of_day(seconds: float) -> str:
    """Format the time some seconds from now as h:mm UTC, with the date if it is far off."""
    end = datetime.now(UTC) + timedelta(seconds=seconds)
    return f"{end:%H:%M} UTC" if seconds < DATED_SECONDS else f"{end:%d %b %H:%M} UTC"
