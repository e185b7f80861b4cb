"""Progress of long loops: a callback that receives ticks.

The caller chooses the listener: `reporting_to(sink)` sets it for everything inside the block, so
that a task run by Prefect reaches the terminal that started the flow.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """`done` of `total` units of a stage are finished; `detail` says what the last one was."""

    stage: str
    done: int
    total: int
    detail: str = ""


Progress = Callable[[Tick], None]  # receives ticks; must return quickly and never raise


def silent(tick: Tick) -> None:
    """Drop the tick."""


_current: ContextVar[Progress] = ContextVar("progress", default=silent)


def current() -> Progress:
    """Return the current sink, to be handed to threads, which do not inherit it."""
    return _current.get()


def report(tick: Tick) -> None:
    """Pass a tick to the current sink."""
    _current.get()(tick)


@contextmanager
def reporting_to(sink: Progress) -> Iterator[None]:
    """Make `sink` the current one while the block runs."""
    token = _current.set(sink)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Prefix the stage names of all ticks inside the block with a label."""
    sink = _current.get()
    with reporting_to(lambda tick: sink(replace(tick, stage=f"{label} {tick.stage}"))):
        yield
