"""Stages that end early, and pipelines in which they run again."""

import os
import shutil
import signal
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

from traces import contents

from exl2flow.core.runtime.progress import Progress, Tick
from exl2flow.core.store.stage import Pipeline
from exl2flow.core.store.store import MANIFEST


class Crash(Exception):
    """Ends a stage as a kill would: nothing more is written."""


def crash() -> None:
    """End the process, as far as the stage can tell."""
    raise Crash


def interrupt() -> None:
    """Send the signal of Ctrl+C."""
    os.kill(os.getpid(), signal.SIGINT)


def after(stage: str, done: int, act: Callable[[], object], *, words: str = "") -> Progress:
    """Return a sink that acts when a stage has committed its result number `done`.

    `words` are in the detail of that tick, which is not empty.
    """

    def sink(tick: Tick) -> None:
        if (tick.stage, tick.done) == (stage, done) and tick.detail and words in tick.detail:
            act()

    return sink


def before(pipeline: Pipeline, stage: str, root: Path, **values: object) -> Pipeline:
    """Return a pipeline in a work root of its own with all that comes before a stage."""
    config = pipeline.config.model_copy(update={"work_root": root, **values})
    made = Pipeline(config, tuple(pipeline.stages.values()), device="cpu")
    for name in takewhile(lambda name: name != stage, made.stages):
        shutil.copytree(pipeline.path(name), made.path(name))
    return made


def results(pipeline: Pipeline, stage: str) -> dict[str, str]:
    """Return the sha256 of all that a stage left but its manifest."""
    files = contents(pipeline.path(stage))
    return {name: digest for name, digest in files.items() if name != MANIFEST}
