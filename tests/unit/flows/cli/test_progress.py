import io

import pytest
from rich.console import Console
from rich.progress import Progress as Bars

from exl2flow.core.progress import Tick, report
from exl2flow.flows.cli import progress
from exl2flow.flows.cli.progress import PlainLines, StageBars, shown


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
