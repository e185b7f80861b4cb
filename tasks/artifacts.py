"""Artifacts on the page of a run, published at best effort: a failure here never stops a run."""

import base64
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import TypeVar, cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from exl2flow.core.errors import Exl2FlowError, Interrupted
from exl2flow.core.runtime.pace import Pace, time_of_day
from exl2flow.core.runtime.progress import Tick, current, report, reporting_to
from exl2flow.core.runtime.whole_run import Watcher, WholeRun

log = logging.getLogger(__name__)

T = TypeVar("T")

UPDATE_SECONDS = 5.0  # an update is a request and a row in the server's database
RUN_BAR = "run"  # name of the artifact of a whole run
MOST_ROWS = 2000  # of a table: a browser shows them all at once
PAUSE_SECONDS = 300.0  # after a failure: an API that is away can take a minute to say so


class Artifacts:
    """Publishes artifacts under keys that begin with the model's name, so each has a history."""

    def __init__(self, model: str) -> None:
        self._prefix = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-") or "model"
        self._paused_until = 0.0
        self._warned = False

    def key(self, name: str) -> str:
        """Return the key of an artifact."""
        return f"{self._prefix}-{name}"

    def table(self, name: str, rows: Sequence[Mapping[str, str]], description: str) -> None:
        """Publish a table."""
        self.attempt(
            lambda: create_table_artifact(
                key=self.key(name), table=[dict(row) for row in rows], description=description
            )
        )

    def markdown(self, name: str, text: str, description: str) -> None:
        """Publish a page of Markdown."""
        self.attempt(
            lambda: create_markdown_artifact(
                key=self.key(name), markdown=text, description=description
            )
        )

    def attempt(self, call: Callable[[], T]) -> T | None:
        """Return the call's result, or None if it fails or an earlier call failed recently."""
        if time.monotonic() < self._paused_until:
            return None
        try:
            return call()
        except Exception as error:  # the one place where any error is harmless
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            if not self._warned:
                log.warning("cannot publish artifacts, continuing without: %s", error)
            self._warned = True
            return None


def markdown_plot(svg: str, description: str) -> str:
    """Return a plot as Markdown with the image embedded, since a page may load no other file."""
    return f"![{description}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


class Bar:
    """A bar on the page of the run or the task in whose context it is made.

    A thread moves it, because a server on busy cores is slow; `close` waits for it.
    """

    def __init__(self, artifacts: Artifacts, name: str) -> None:
        self._artifacts = artifacts
        self._key = artifacts.key(name)
        self._id: UUID | None = None
        self._updated = -math.inf
        self._run = copy_context().run  # the context names the run
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="exl2flow-progress")
        self.moving: Future[object] | None = None

    def close(self) -> None:
        """Wait until the bar is up to date."""
        self._pool.shutdown()

    def is_due(self, now: float) -> bool:
        """Return whether the last update is neither recent nor still being sent."""
        is_sent = self.moving is None or self.moving.done()
        return is_sent and now - self._updated >= UPDATE_SECONDS

    def move(self, percent: float, words: str, now: float) -> None:
        """Show another state; ask `is_due` first unless it is the last one."""
        self._updated = now
        publish = partial(self._publish, percent, words)
        self.moving = self._pool.submit(self._run, self._artifacts.attempt, publish)

    def _publish(self, percent: float, words: str) -> None:
        if self._id is None:
            created = create_progress_artifact(percent, key=self._key, description=words)
            self._id = cast(UUID, created)  # a coroutine only in asynchronous flows
        else:
            update_progress_artifact(self._id, percent, description=words)


class ProgressArtifact:
    """A `Progress` that also moves a bar on the run's page if there is more than one step."""

    def __init__(self, artifacts: Artifacts, name: str) -> None:
        self.bar = Bar(artifacts, name)
        self._stage = ""
        self._pace: Pace | None = None

    def close(self) -> None:
        """Wait until the bar is up to date."""
        self.bar.close()

    def __call__(self, tick: Tick) -> None:
        """Pass the tick on, and publish it unless the last update is recent or still being sent."""
        report(tick)
        now = time.monotonic()
        if self._pace is None or tick.stage != self._stage:
            self._stage, self._pace = tick.stage, Pace.start(tick, now)
        self._pace.update(tick, now)
        if tick.total > 1 and (tick.done >= tick.total or self.bar.is_due(now)):
            words = progress_words(tick, self._pace, now)
            self.bar.move(100.0 * tick.done / tick.total, words, now)


class RunArtifact(Watcher):
    """Shows how far the whole run is by a bar of the flow run, its first artifact."""

    def __init__(self, artifacts: Artifacts, run: WholeRun) -> None:
        super().__init__(run)
        self.bar = Bar(artifacts, RUN_BAR)
        self._result: object = None
        self._move(time.monotonic())

    def __call__(self, tick: Tick) -> None:
        """Take a tick, and publish it unless the last update is recent or still being sent."""
        now = time.monotonic()
        self.run.update(tick, now)
        if self.bar.is_due(now):
            self._move(now)

    def expect(self, stages: Sequence[str]) -> None:
        """See `Watcher`."""
        super().expect(stages)
        self._move(time.monotonic())

    def finish(self, result: object) -> None:
        """See `Watcher`."""
        self._result = result

    def end(self, error: BaseException | None) -> None:
        """Show how the run ended, and wait until that is shown."""
        share = self.run.share if error else 1.0
        words = self.run.ended(f"done: {self._result}" if error is None else _failure(error))
        self.bar.move(100.0 * share, words, time.monotonic())
        self.bar.close()

    def _move(self, now: float) -> None:
        self.bar.move(100.0 * self.run.share, self.run.words(now), now)


def _failure(error: BaseException) -> str:
    """Return how a run ended that did not complete."""
    if isinstance(error, Interrupted) or not isinstance(error, Exception):
        return f"cancelled: {error}" if str(error) else "cancelled"
    kind = "" if isinstance(error, Exl2FlowError) else f"unexpected {type(error).__name__}: "
    return f"failed: {kind}{error}"


@contextmanager
def run_artifact(model: str, output: str) -> Iterator[RunArtifact]:
    """Show on the page of this flow run how far the work inside the block is.

    Args:
        model: name of the model, with which the artifact's key begins.
        output: where the result goes, for people.
    """
    watcher, listener = RunArtifact(Artifacts(model), WholeRun(output)), current()

    def sink(tick: Tick) -> None:
        listener(tick)
        watcher(tick)

    error: BaseException | None = None
    try:
        with reporting_to(sink):
            yield watcher
    except BaseException as caught:  # also what cancels a run
        error = caught
        raise
    finally:
        watcher.end(error)


def progress_words(tick: Tick, pace: Pace, now: float) -> str:
    """Return a stage's progress, its remaining and elapsed time.

    The most important comes first, because lists show only the beginning. The page does not count
    down, so the words include the time of day at which the stage ends.
    """
    times, left = pace.times(now), pace.remaining(now)
    words = [f"{tick.done} of {tick.total}"]
    words += [f"{what} {times[what]}" for what in ("remaining", "elapsed") if what in times]
    if left:
        words += [f"ends about {time_of_day(left)}"]
    if tick.detail and tick.done < tick.total:
        words += [f"last: {tick.detail}"]
    return " · ".join(words)
