"""Artifacts on the page of a run, published at best effort: a failure here never stops a run."""

import base64
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypeVar, cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from exl2flow.core.runtime.pace import Pace
from exl2flow.core.runtime.progress import Tick, report

log = logging.getLogger(__name__)

T = TypeVar("T")

UPDATE_SECONDS = 5.0  # an update is a request and a row in the server's database
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


class ProgressArtifact:
    """A `Progress` that also moves a bar on the run's page if there is more than one step.

    A thread moves the bar, because a server on busy cores is slow; `close` waits for it.
    """

    def __init__(self, artifacts: Artifacts, stage: str) -> None:
        self._artifacts = artifacts
        self._stage = stage
        self._id: UUID | None = None
        self._pace: Pace | None = None
        self._updated = 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="exl2flow-progress")
        self._moving: Future[object] | None = None

    def close(self) -> None:
        """Wait until the bar is up to date."""
        self._pool.shutdown()

    def __call__(self, tick: Tick) -> None:
        """Pass the tick on, and publish it unless the last update is recent or still being sent."""
        report(tick)
        now = time.monotonic()
        self._pace = self._pace or Pace.start(tick, now)
        self._pace.update(tick, now)
        moving = self._moving is not None and not self._moving.done()
        recent = moving or now - self._updated < UPDATE_SECONDS
        if tick.total < 2 or (recent and tick.done < tick.total):
            return
        self._updated = now
        words = progress_words(tick, self._pace, now)
        publish = partial(self._publish, 100.0 * tick.done / tick.total, words)
        run = copy_context().run  # the context names the run
        self._moving = self._pool.submit(run, self._artifacts.attempt, publish)

    def _publish(self, percent: float, words: str) -> None:
        if self._id is None:
            key = self._artifacts.key(self._stage)
            created = create_progress_artifact(percent, key=key, description=words)
            self._id = cast(UUID, created)  # a coroutine only in asynchronous flows
        else:
            update_progress_artifact(self._id, percent, description=words)


def progress_words(tick: Tick, pace: Pace, now: float) -> str:
    """Return a stage's progress, its remaining and elapsed time.

    The most important comes first, because lists show only the beginning. The page does not count
    down, so the words include the time of day at which the stage ends.
    """
    times, left = pace.times(now), pace.remaining(now)
    words = [f"{tick.done} of {tick.total}"]
    words += [f"{what} {times[what]}" for what in ("remaining", "elapsed") if what in times]
    if left:
        end = datetime.now(UTC) + timedelta(seconds=left)
        words += [f"ends about {end:%H:%M} UTC"]
    if tick.detail and tick.done < tick.total:
        words += [f"last: {tick.detail}"]
    return " · ".join(words)
