"""Where a signal of a campaign hits: a stage is drawn first, then the moment in it."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scenarios import AFTER, BEFORE, BETWEEN, Stamps, manifests, under_way

HIT = 0.5  # of each stage that is left, the earliest first: so all are hit equally often
POLL_SECONDS = 0.01
SHORTEST_END = 0.3  # seconds behind the last stage that count as one


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A command's stages when nothing disturbs it.

    seconds: by stage, in order, `AFTER` for what comes behind the last one, such as a publication;
    finished: how many manifests of each there are in the end.
    """

    seconds: dict[str, float]
    finished: Counter[str]

    @classmethod
    def watched(cls, work_root: Path, has_ended: Callable[[], bool]) -> "Course":
        """Watch a command until it has ended."""
        seconds: dict[str, float] = {}
        since = last = time.monotonic()  # last: when a stage was seen
        while not has_ended():
            stage, now = under_way(work_root), time.monotonic()
            if stage != BETWEEN:
                seconds[stage] = seconds.get(stage, 0.0) + now - since
                last = now
            since = now
            time.sleep(POLL_SECONDS)
        behind = time.monotonic() - last
        if behind > SHORTEST_END:
            seconds[AFTER] = behind
        return cls(seconds=seconds, finished=_finished(work_root))

    def now(self, work_root: Path, known: Stamps) -> str:
        """Return the stage that a command is working on; see `under_way`."""
        stage = under_way(work_root, known)
        return AFTER if stage == BETWEEN and set(self.left(work_root)) == {AFTER} else stage

    def left(self, work_root: Path) -> list[str]:
        """Return the stages that a command has yet to finish."""
        done, has_begun = _finished(work_root), bool(manifests(work_root))
        marks = {BEFORE: not has_begun, AFTER: True}
        return [
            stage for stage in self.seconds if marks.get(stage, done[stage] < self.finished[stage])
        ]

    def until_drawn(
        self, work_root: Path, known: Stamps, rng: random.Random, has_ended: Callable[[], bool]
    ) -> float | None:
        """Draw a stage and wait for it; return after how many seconds in it to disturb it.

        None: the command ended before, because nothing was drawn. One that passes unseen is drawn
        again. known: the manifests when the command was started.
        """
        stage: str | None = None
        while not has_ended():
            left = self.left(work_root)
            if stage not in (*left, ""):
                stage = drawn(left, rng)
            if stage and self.now(work_root, known) == stage:
                return rng.uniform(0, self.seconds[stage])
            time.sleep(POLL_SECONDS)
        return None


def drawn(left: Sequence[str], rng: random.Random) -> str:
    """Return one of the stages that are left, "" for none of them.

    A signal in a late stage means that the earlier ones are finished and never hit again. With the
    same chance for each in turn, a command expects as many signals in every stage.
    """
    return next((stage for stage in left if rng.random() < HIT), "")


def _finished(work_root: Path) -> Counter[str]:
    found = manifests(work_root).values()
    return Counter(each["stage"] for each in found if each["status"] != "partial")
