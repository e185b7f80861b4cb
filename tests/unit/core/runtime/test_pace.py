"""Elapsed and remaining time of a stage, as the command line and pages of runs show them."""

from exl2flow.core.runtime.pace import Pace, clock
from exl2flow.core.runtime.progress import Tick


def tick(done: int) -> Tick:
    return Tick(stage="measure", done=done, total=10)


def test_remaining_time_follows_the_pace_and_counts_down() -> None:
    pace = Pace.start(tick(0), now=0.0)

    pace.update(tick(2), now=10.0)

    assert pace.remaining(10.0) == 40.0
    assert pace.remaining(13.0) == 37.0
    assert pace.remaining(1000.0) == 0.0


def test_work_finished_before_a_resume_does_not_count_as_speed() -> None:
    pace = Pace.start(tick(6), now=0.0)
    assert pace.remaining(1.0) is None

    pace.update(tick(8), now=20.0)

    assert pace.remaining(20.0) == 20.0


def test_a_finished_stage_stands_still() -> None:
    pace = Pace.start(tick(0), now=0.0)

    pace.update(tick(10), now=30.0)

    assert pace.elapsed(500.0) == 30.0
    assert pace.remaining(500.0) == 0.0


def test_elapsed_time_is_counted_from_the_first_tick() -> None:
    pace = Pace.start(tick(0), now=100.0)

    pace.update(tick(5), now=110.0)
    assert pace.elapsed(120.0) == 20.0

    pace.update(tick(10), now=130.0)
    assert pace.elapsed(500.0) == 30.0


def test_times_are_told_once_something_was_done() -> None:
    pace = Pace.start(tick(6), now=0.0)
    assert pace.times(5.0) == {}

    pace.update(tick(7), now=61.0)
    assert pace.times(61.0) == {"elapsed": "0:01:01", "remaining": "0:03:03"}

    pace.update(tick(10), now=100.0)
    assert pace.times(500.0) == {"elapsed": "0:01:40"}


def test_clock_shows_hours_and_a_dash_for_the_unknown() -> None:
    assert (clock(None), clock(3725.4)) == ("-:--:--", "1:02:05")
