"""Ticks reach the sink that is current."""

import threading
from contextvars import copy_context

import pytest

from exl2flow.core.runtime.progress import Tick, current, labelled, report, reporting_to, silent

TICK = Tick(stage="measure", done=1, total=4)


def test_ticks_reach_the_current_sink_and_no_other() -> None:
    outer: list[Tick] = []
    inner: list[Tick] = []

    with reporting_to(outer.append):
        report(TICK)
        with reporting_to(inner.append):
            report(Tick(stage="measure", done=2, total=4))
        report(TICK)

    assert outer == [TICK, TICK]
    assert [tick.done for tick in inner] == [2]


def test_without_a_sink_ticks_are_dropped() -> None:
    seen: list[Tick] = []
    with reporting_to(seen.append):
        pass

    report(TICK)

    assert seen == []


def test_sink_is_restored_after_an_error() -> None:
    seen: list[Tick] = []

    with pytest.raises(ValueError, match="stop"), reporting_to(seen.append):
        raise ValueError("stop")
    report(TICK)

    assert seen == []


def test_sink_follows_the_context_into_another_thread() -> None:
    seen: list[Tick] = []

    with reporting_to(seen.append):
        context = copy_context()
    thread = threading.Thread(target=context.run, args=(report, TICK))
    thread.start()
    thread.join()

    assert seen == [TICK]


def test_a_thread_is_handed_the_current_sink() -> None:
    seen: list[Tick] = []
    assert current() is silent

    with reporting_to(seen.append):
        current()(TICK)

    assert seen == [TICK]


def test_a_label_stands_before_the_names_of_stages() -> None:
    seen: list[Tick] = []

    with reporting_to(seen.append):
        with labelled("3.0bpw"):
            report(TICK)
        report(TICK)

    assert [tick.stage for tick in seen] == ["3.0bpw measure", "measure"]
    assert seen[0].done == 1
