"""A run on the command line: plan, progress, report, and what failed; its imports take seconds."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from exl2flow.cli.options import RunSwitches, flags
from exl2flow.cli.output.console import emit_json, say, show, tell
from exl2flow.cli.output.progress import shown
from exl2flow.cli.output.results import print_published, print_report, print_sweep
from exl2flow.cli.output.tables import plan_table
from exl2flow.cli.work.sources import sources
from exl2flow.core.errors import (
    HubError,
    PreflightFailed,
    PublicationDamaged,
    PublicationRefused,
    SweepFailed,
    ValidationFailed,
)
from exl2flow.core.options.config import RunOptions
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.options.sweep import SWEEP_FILE, SweepConfig
from exl2flow.core.reports import JudgementReport, Report
from exl2flow.core.runtime.pace import clock
from exl2flow.core.store.changes import stage_rows
from exl2flow.core.store.files import read_json, replacing
from exl2flow.core.store.stage import Stage
from exl2flow.core.words import size
from exl2flow.inference.validate.stage import REPORT_FILE
from exl2flow.model.files.measured import arrays_file, measurement_files
from exl2flow.pipeline.bitrates import check_runner
from exl2flow.pipeline.conversion import conversions_of, open_pipeline
from exl2flow.pipeline.hub.publish import Published
from exl2flow.pipeline.local import HERE, RUNS, carry_out
from exl2flow.pipeline.preparation import Prepared, prepare_source, reuse_checks
from exl2flow.pipeline.release import check_release
from exl2flow.quant.forecast.plan import Plan
from exl2flow.quant.judge.stage import JUDGEMENT_FILE, judgement_in_words
from exl2flow.quant.measure.measurement import MEASUREMENT_FILE

NOT_PUBLISHED = (PublicationRefused, PublicationDamaged, HubError)
ONLY_PUBLISHING = "converted but not published; repeat the command to publish"


def execute(
    name: str,
    config: RunOptions,
    flow: Callable[[RunOptions], Any] | None,
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
    stages = RUNS[name].stages
    if isinstance(config, SweepConfig):
        check_runner(config)
    check_release(config)
    made = () if switches.restart else stages
    having = sources(plain=switches.as_json, renew=switches.restart)
    try:
        prepared = prepare_source(config, made, having, dry_run=switches.dry_run)
    except PreflightFailed as error:
        if switches.dry_run and error.plan and not switches.as_json:
            show(plan_table(error.plan))
        raise
    if not switches.as_json:
        show(plan_table(_plan_rows(prepared)))
    if switches.dry_run:
        if switches.as_json:
            emit_json(prepared.to_json())
        return
    config, result, failure = prepared.config, None, None
    if switches.restart:
        _forget(config, stages)
    with shown(plain=switches.as_json), reuse_checks(prepared):
        try:
            result = flow(config) if flow else carry_out(RUNS[name], config, HERE)
        except (ValidationFailed, SweepFailed, *NOT_PUBLISHED) as error:
            failure = error  # the result is shown first, if there is one
    report = _report(config, stages, result)
    seconds = time.monotonic() - started
    if report is not None and switches.as_json:
        emit_json({**prepared.to_json(), "seconds": round(seconds, 1), **report})
    elif report is not None:
        _print(config, report)
        tell(f"time    {clock(seconds)}")
    if report is not None and isinstance(failure, NOT_PUBLISHED):
        say(ONLY_PUBLISHING)
    if failure is not None:
        raise failure


def _plan_rows(prepared: Prepared[RunOptions]) -> list[tuple[str, str]]:
    """Return (what, value) of what will be done."""
    config, plans = prepared.config, prepared.plans
    if isinstance(config, SweepConfig):
        return _sweep_rows(config, plans)
    plan = prepared.plan
    if not isinstance(config, MeasureConfig | RefinementConfig):
        return [*plan.rows(flags()), *(prepared.fit.rows() if prepared.fit else [])]
    source = f"{plan.model} ({plan.architecture}, {plan.layers} layers)"
    models = [("model", source)]
    if isinstance(config, RefinementConfig):
        models = [("model", str(config.model)), ("reference", source)]
    return [
        *models,
        ("device", plan.device),
        ("calibration", plan.calibration),
        ("output", str(config.out.resolve())),
        ("checkpoints", plan.work_dir),
        *stage_rows(plan.stages, flags()),
    ]


def _sweep_rows(config: SweepConfig, plans: Mapping[str, Plan]) -> list[tuple[str, str]]:
    """Return (what, value) for all bitrates, whose plans are mostly the same."""
    rows = dict(next(iter(plans.values())).rows())
    sizes = [f"{name} about {size(plan.output_bytes)}" for name, plan in plans.items()]
    several = {"target": ", ".join(plans), "output": f"{config.out}: {', '.join(sizes)}"}
    stages = {name: dict(stage_rows(plan.stages, flags())) for name, plan in plans.items()}
    for what in dict.fromkeys(what for known in stages.values() for what in known):
        told = [f"{name}: {known[what]}" for name, known in stages.items() if what in known]
        several[what] = "; ".join(told)
    largest = max(plans.values(), key=lambda plan: plan.memory_bytes)
    return list({**rows, **several, "memory": dict(largest.rows())["memory"]}.items())


def _forget(config: RunOptions, stages: Sequence[Stage[Any]]) -> None:
    """Delete the stage folders of this configuration; those of other options stay.

    Raises:
        WorkDirBusy: another process uses them.
    """
    for conversion in conversions_of(config).values():
        pipeline = open_pipeline(conversion, stages)
        with pipeline.work.lock():
            for name in pipeline.refs:
                shutil.rmtree(pipeline.path(name), ignore_errors=True)


def _report(config: RunOptions, stages: Sequence[Stage[Any]], result: Any) -> dict[str, Any] | None:
    """Return what a run says of its result, as JSON; None if it has none.

    `result` is what it returned; None if it failed, for example because the model is above a limit.
    """
    out = config.out.resolve()
    if isinstance(config, SweepConfig):
        is_made = (out / SWEEP_FILE).exists()
        return {"out": str(out), **read_json(out / SWEEP_FILE)} if is_made else None
    if isinstance(config, MeasureConfig):
        folder = result.stages["measure"]
        *arrays, measurement = reversed(measurement_files(folder / MEASUREMENT_FILE))
        for path, target in [*((path, arrays_file(out)) for path in arrays), (measurement, out)]:
            with path.open("rb") as file, replacing(target) as copy:
                shutil.copyfileobj(file, copy)
        return {"measurement": str(out), "folder": str(folder)}
    pipeline = open_pipeline(config, stages)
    if not pipeline.is_complete("validate"):
        return None
    folder = pipeline.path("validate")
    report = {**read_json(folder / REPORT_FILE), "report_folder": str(folder)}
    if isinstance(config, RefinementConfig):
        return {**report, "refinement": read_json(pipeline.path("judge") / JUDGEMENT_FILE)}
    published = result and result.published
    return {**report, "published": published and asdict(published)}


def _print(config: RunOptions, report: Mapping[str, Any]) -> None:
    """Print the result of a run for people."""
    if isinstance(config, MeasureConfig):
        tell(f"measurement  {report['measurement']}")
    elif isinstance(config, SweepConfig):
        print_sweep(config.out.resolve(), report["bitrates"], report["warnings"])
    else:
        print_report(Report.from_json({**report}), report["report_folder"])
    if isinstance(config, RefinementConfig):
        tell(judgement_in_words(JudgementReport.from_json(report["refinement"])))
    if report.get("published"):
        print_published(Published(**report["published"]))
