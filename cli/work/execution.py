"""A run on the command line: plan, progress, report, and what failed; its imports take seconds."""

import shutil
import time
from collections.abc import Callable
from typing import Any

from exl2flow.cli.options import RunSwitches
from exl2flow.cli.output.console import emit_json, say, show, tell
from exl2flow.cli.output.progress import shown
from exl2flow.cli.output.tables import plan_table
from exl2flow.cli.work.sources import sources
from exl2flow.cli.work.views import VIEWS
from exl2flow.core.errors import (
    HubError,
    PreflightFailed,
    PublicationDamaged,
    PublicationRefused,
    SweepFailed,
    ValidationFailed,
)
from exl2flow.core.options.config import RunOptions
from exl2flow.core.runtime.pace import clock
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.local import HERE, RUNS, carry_out
from exl2flow.pipeline.preparation import prepare_source
from exl2flow.pipeline.release import check_release
from exl2flow.pipeline.run import Prepared, Run

NOT_PUBLISHED = (PublicationRefused, PublicationDamaged, HubError)
ONLY_PUBLISHING = "converted but not published; repeat the command to publish"


def execute(
    name: str,
    config: RunOptions,
    flow: Callable[[Prepared[RunOptions]], Any] | None,
    switches: RunSwitches,
) -> None:
    """Check a run of `RUNS`, carry it out and print it.

    Args:
        name: of the run.
        config: its options.
        flow: runs it on a server; None: this process does, without Prefect.
        switches: `restart` also takes the newest commit of a source.

    Raises:
        Exl2FlowError: what went wrong, after the report if there is a result.
    """
    started = time.monotonic()
    run, view = RUNS[name], VIEWS[name]
    prepared = _prepared(run, config, switches)
    if not switches.as_json:
        show(plan_table(view.rows(prepared)))
    if switches.dry_run:
        if switches.as_json:
            emit_json(view.plan(prepared))
        return
    if switches.restart:
        _forget(run, prepared)
    failure = None
    with shown(plain=switches.as_json):
        try:
            result = flow(prepared) if flow else carry_out(run, prepared, HERE)
        except (ValidationFailed, SweepFailed, *NOT_PUBLISHED) as error:
            failure, result = error, error.result  # it is shown first, if there is one
    if result is not None:
        report = view.report(prepared.config, result)
        seconds = time.monotonic() - started
        if switches.as_json:
            emit_json({**view.plan(prepared), "seconds": round(seconds, 1), **report})
        else:
            view.show(report)
            tell(f"time    {clock(seconds)}")
        if isinstance(failure, NOT_PUBLISHED):
            say(ONLY_PUBLISHING)
    if failure is not None:
        raise failure


def _prepared(run: Run, config: RunOptions, switches: RunSwitches) -> Prepared[RunOptions]:
    """Check a run, and show the plan that is left of one that is refused."""
    run.check(config)
    check_release(config)
    having = sources(plain=switches.as_json, renew=switches.restart)
    try:
        return prepare_source(run, config, having, anew=switches.restart, dry_run=switches.dry_run)
    except PreflightFailed as error:
        if switches.dry_run and error.plan and not switches.as_json:
            show(plan_table(error.plan))
        raise


def _forget(run: Run, prepared: Prepared[RunOptions]) -> None:
    """Delete the stage folders of this configuration; those of other options stay.

    Raises:
        WorkDirBusy: another process uses them.
    """
    for model in prepared.models.values():
        pipeline = open_pipeline(model, run.stages)
        with pipeline.work.lock():
            for name in pipeline.refs:
                shutil.rmtree(pipeline.path(name), ignore_errors=True)
