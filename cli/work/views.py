"""Each kind of run on the command line: its plan, its result."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exl2flow.cli.options import flags
from exl2flow.cli.output.console import tell
from exl2flow.cli.output.results import print_published, print_report, print_sweep
from exl2flow.core.options.config import RunOptions
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.reports import Json, JudgementReport, Report
from exl2flow.core.store.changes import stage_rows
from exl2flow.core.store.files import read_json, replacing
from exl2flow.core.words import size
from exl2flow.model.files.measured import arrays_file, measurement_files
from exl2flow.pipeline.bitrates import Sweep
from exl2flow.pipeline.conversion import Conversion
from exl2flow.pipeline.hub.publish import Published
from exl2flow.pipeline.run import Prepared
from exl2flow.quant.judge.stage import JUDGEMENT_FILE, judgement_in_words

Rows = list[tuple[str, str]]  # (what, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The appearance of a kind of run.

    rows: its plan for people; plan: as JSON; report: its result as JSON; show: prints a report.
    """

    rows: Callable[[Prepared[Any]], Rows]
    plan: Callable[[Prepared[Any]], Json]
    report: Callable[[Any, Any], Json]
    show: Callable[[Json], None]


def _conversion_rows(prepared: Prepared[RunOptions]) -> Rows:
    return [*prepared.plan.rows(flags()), *(prepared.fit.rows() if prepared.fit else [])]


def _measurement_rows(prepared: Prepared[MeasureConfig]) -> Rows:
    return [("model", _source(prepared)), *_place_rows(prepared)]


def _refinement_rows(prepared: Prepared[RefinementConfig]) -> Rows:
    models = [("model", str(prepared.config.model)), ("reference", _source(prepared))]
    return [*models, *_place_rows(prepared)]


def _source(prepared: Prepared[Any]) -> str:
    plan = prepared.plan
    return f"{plan.model} ({plan.architecture}, {plan.layers} layers)"


def _place_rows(prepared: Prepared[Any]) -> Rows:
    """Return on what a run that has no target works, and where its results go."""
    plan = prepared.plan
    return [
        ("device", plan.device),
        ("calibration", plan.calibration),
        ("output", str(prepared.config.out.resolve())),
        ("checkpoints", plan.work_dir),
        *stage_rows(plan.stages, flags()),
    ]


def _sweep_rows(prepared: Prepared[SweepConfig]) -> Rows:
    """Return (what, value) for all bitrates, whose plans are mostly the same."""
    plans, out = prepared.plans, prepared.config.out
    rows = dict(next(iter(plans.values())).rows())
    sizes = [f"{name} about {size(plan.output_bytes)}" for name, plan in plans.items()]
    several = {"target": ", ".join(plans), "output": f"{out}: {', '.join(sizes)}"}
    stages = {name: dict(stage_rows(plan.stages, flags())) for name, plan in plans.items()}
    for what in dict.fromkeys(what for known in stages.values() for what in known):
        told = [f"{name}: {known[what]}" for name, known in stages.items() if what in known]
        several[what] = "; ".join(told)
    largest = max(plans.values(), key=lambda plan: plan.memory_bytes)
    return list({**rows, **several, "memory": dict(largest.rows())["memory"]}.items())


def _one_plan(prepared: Prepared[Any]) -> Json:
    """Return the plan, and how the memory given is divided."""
    fit = {"fit": prepared.fit.to_json()} if prepared.fit else {}
    return {"plan": prepared.plan.to_json(), **fit}


def _all_plans(prepared: Prepared[Any]) -> Json:
    return {"plans": {name: plan.to_json() for name, plan in prepared.plans.items()}}


def _conversion(config: RunOptions, result: Conversion) -> Json:
    published = result.published and asdict(result.published)
    return {**(result.report or {}), "published": published}


def _refinement(config: RefinementConfig, result: Conversion) -> Json:
    judgement = read_json(result.stages["judge"] / JUDGEMENT_FILE)
    return {**(result.report or {}), "refinement": judgement}


def _measurement(config: MeasureConfig, result: Conversion | Path) -> Json:
    """Copy a measurement, the file of which the flow returns, to where the user wants it."""
    made = result if isinstance(result, Path) else result.measurement
    out, folder = config.out.resolve(), made.parent
    *arrays, measurement = reversed(measurement_files(made))
    for path, target in [*((path, arrays_file(out)) for path in arrays), (measurement, out)]:
        with path.open("rb") as file, replacing(target) as copy:
            shutil.copyfileobj(file, copy)
    return {"measurement": str(out), "folder": str(folder)}


def _sweep(config: SweepConfig, result: Sweep) -> Json:
    return {"out": str(result.out), **result.content}


def _show_conversion(report: Json) -> None:
    print_report(Report.from_json(report), report["report_folder"])
    _show_published(report)


def _show_refinement(report: Json) -> None:
    print_report(Report.from_json(report), report["report_folder"])
    tell(judgement_in_words(JudgementReport.from_json(report["refinement"])))


def _show_measurement(report: Json) -> None:
    tell(f"measurement  {report['measurement']}")


def _show_sweep(report: Json) -> None:
    print_sweep(Path(report["out"]), report["bitrates"], report["warnings"])
    _show_published(report)


def _show_published(report: Json) -> None:
    if report["published"]:
        print_published(Published(**report["published"]))


VIEWS: Mapping[str, View] = {  # of the kinds in `pipeline.local.RUNS`
    "convert": View(
        rows=_conversion_rows, plan=_one_plan, report=_conversion, show=_show_conversion
    ),
    "measure": View(
        rows=_measurement_rows, plan=_one_plan, report=_measurement, show=_show_measurement
    ),
    "refine": View(
        rows=_refinement_rows, plan=_one_plan, report=_refinement, show=_show_refinement
    ),
    "sweep": View(rows=_sweep_rows, plan=_all_plans, report=_sweep, show=_show_sweep),
}
