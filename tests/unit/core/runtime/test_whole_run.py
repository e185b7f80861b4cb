"""How far a run of several stages is, in a share and in words."""

import logging
from datetime import UTC, datetime, timedelta

import pytest

from exl2flow.core.runtime import whole_run
from exl2flow.core.runtime.pace import time_of_day
from exl2flow.core.runtime.progress import Tick, report, reporting_to
from exl2flow.core.runtime.whole_run import WholeRun, logging_progress

STAGES = ("tokenize", "sensitivity", "measure", "allocate")


def tick(stage: str, done: int, total: int) -> Tick:
    return Tick(stage=stage, done=done, total=total)


@pytest.fixture
def run() -> WholeRun:
    started = WholeRun("`out`")
    started.expect(STAGES)
    return started


def test_words_name_stage_of_stages_step_of_steps_end_and_output(run: WholeRun) -> None:
    run.update(tick("tokenize", 1, 1), 0.0)
    run.update(tick("measure", 0, 9), 0.0)
    run.update(tick("measure", 4, 9), 40.0)

    end = f"{datetime.now(UTC) + timedelta(seconds=50):%H:%M} UTC"
    assert run.words(40.0) == f"stage 3 of 4, measure, 4 of 9, ends about {end} · output `out`"
    assert run.share == (2 + 4 / 9) / 4


def test_words_before_the_stages_are_known_and_before_the_first_step() -> None:
    run = WholeRun("`out`")

    checks = run.words(0.0)
    run.update(tick("fetch", 1, 3), 0.0)
    fetching, share = run.position(0.0), run.share
    run = WholeRun("`out`")
    run.expect(STAGES)

    assert checks == "checks before work · output `out`"
    assert (fetching, share) == ("fetch, 1 of 3", 0.0)
    assert run.position(0.0) == "stage 1 of 4 begins"


def test_cached_stages_count_as_done(run: WholeRun) -> None:
    for stage in STAGES:
        run.update(tick(stage, 1, 1), 0.0)

    assert run.share == 1.0
    assert run.position(0.0) == "stage 4 of 4, allocate"


def test_models_made_at_the_same_time_count_apart() -> None:
    run = WholeRun("`out`")
    run.expect(["measure", "3bpw quantize", "3bpw validate", "4bpw quantize", "4bpw validate"])

    run.update(tick("4bpw quantize", 1, 2), 0.0)
    one_begun = (run.share, run.position(0.0))
    run.update(tick("4bpw validate", 1, 1), 0.0)  # all that another process tells

    assert one_begun == (1.5 / 5, "stage 2 of 5, 4bpw quantize, 1 of 2")
    assert run.share == 3 / 5


@pytest.mark.parametrize(("hours", "has_date"), [(1, False), (30, True)])
def test_an_end_that_is_far_away_has_a_date(hours: int, has_date: bool) -> None:
    words = time_of_day(hours * 3600.0)

    assert words.endswith(" UTC")
    assert (len(words.split()) == 4) is has_date


def test_log_has_begin_and_end_of_each_stage_and_other_listeners_hear_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[Tick] = []
    ticks = [tick("measure", done, 9) for done in range(10)]

    with (
        caplog.at_level(logging.INFO),
        reporting_to(heard.append),
        logging_progress("`out`") as watcher,
    ):
        watcher.expect(STAGES)
        for each in ticks:
            report(each)
        watcher.finish("`out`: 1 MB")

    assert heard == ticks
    first, last, result = caplog.messages
    assert first == "stage 3 of 4, measure, 0 of 9"
    assert last == "stage 3 of 4, measure, 9 of 9"
    assert result == "done: `out`: 1 MB"
    assert {record.name for record in caplog.records} == {whole_run.__name__}
