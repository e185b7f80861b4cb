import io

import pytest
from rich.console import Console
from rich.progress import Progress as Bars

from exl2flow.cli.output import progress
from exl2flow.cli.output.progress import PlainLines, StageBars, shown
from exl2flow.core.runtime.progress import Tick, report


@pytest.fixture
def clock_at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def tick(done: int, detail: str = "") -> Tick:
    return Tick(stage="measure", done=done, total=10, detail=detail)


def test_plain_lines_say_stage_count_detail_and_times(
    clock_at: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = PlainLines()

    lines(tick(0))
    clock_at[0] += 90
    lines(tick(5, "model.layers.2.mlp rel_err=0.1"))
    clock_at[0] += 90
    lines(tick(10))

    assert capsys.readouterr().err.splitlines() == [
        "measure 0/10",
        "measure 5/10 model.layers.2.mlp rel_err=0.1 elapsed=0:01:30 remaining=0:01:30",
        "measure 10/10 elapsed=0:03:00",
    ]


def test_quick_steps_are_a_line_a_second_and_the_last_step_is_always_one(
    clock_at: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = PlainLines()

    for done in range(10):
        for _ in range(2):  # validation reports each sublayer once per piece of text
            lines(tick(done, f"layer {done}"))
            clock_at[0] += 0.25
    lines(tick(10))
    lines(tick(10, "again"))

    shown = [line.split(" elapsed")[0] for line in capsys.readouterr().err.splitlines()]
    assert shown == [
        "measure 0/10 layer 0",
        *(f"measure {done}/10 layer {done}" for done in (2, 4, 6, 8)),
        "measure 10/10",
    ]


def test_slow_step_that_reports_again_is_one_line(
    clock_at: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = PlainLines()

    for detail in ("forward 1", "forward 1", "forward 2"):
        lines(tick(0, detail))
        clock_at[0] += 5

    assert capsys.readouterr().err.splitlines() == [
        "measure 0/10 forward 1",
        "measure 0/10 forward 2",
    ]


def test_every_stage_begins_and_ends_with_a_line_however_short_it_is(
    clock_at: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = PlainLines()

    for stage in ("tokenize", "allocate"):
        for done in range(4):
            lines(Tick(stage=stage, done=done, total=3))

    shown = [line.split(" elapsed")[0] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["tokenize 0/3", "tokenize 3/3", "allocate 0/3", "allocate 3/3"]


def test_bars_show_count_and_remaining_time(clock_at: list[float]) -> None:
    console = Console(width=120, record=True, force_terminal=True, file=io.StringIO())
    with Bars(*progress.COLUMNS, console=console, auto_refresh=False) as bars:
        sink = StageBars(bars)
        sink(tick(0))
        clock_at[0] += 60
        sink(tick(4, "model.layers.1.mlp [rel_err]=0.1"))
        bars.refresh()

    text = console.export_text()
    assert "4/10" in text
    assert "ETA 0:01:30" in text
    assert "1.mlp [rel_err]=0.1" in text


def test_ticks_of_anything_run_inside_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with shown(plain=True):
        report(tick(3, "cached"))
    report(tick(4, "dropped"))

    assert capsys.readouterr().err == "measure 3/10 cached\n"
