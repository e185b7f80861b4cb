"""`exl2flow refine`: better codes and scales for an EXL2 model, at the same size."""

import time
from typing import TYPE_CHECKING, Any

from exl2flow.core.errors import ValidationFailed
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.flows.cli.console import emit_json, show, tell
from exl2flow.flows.cli.options import AsJson, DryRun, NoPrefect, Restart, flags, with_options
from exl2flow.flows.cli.progress import shown
from exl2flow.flows.cli.running import flow_server, forget, run_flow
from exl2flow.flows.cli.sources import with_local_source
from exl2flow.flows.cli.tables import plan_table, print_report

if TYPE_CHECKING:
    from exl2flow.flows.runs.preparation import Prepared
    from exl2flow.flows.server.temporary import Api

EXAMPLES = (
    "Examples:",
    "exl2flow refine ./Llama-3.2-1B-4.0bpw --reference ./Llama-3.2-1B --out ./refined",
    "exl2flow refine ./old --reference ./Llama-3.2-1B --out ./refined --quality best",
    "exl2flow refine ./old --reference ./Llama-3.2-1B --out ./refined --dry-run   (only checks)",
    "To resume an interrupted run, repeat the command.",
)


@with_options()
def refine(
    *,
    config: RefinementConfig,
    restart: Restart = False,
    no_prefect: NoPrefect = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Refit the codes and scales of an EXL2 model to its source.

    Bit widths, groups and permutations stay, so the size is the same to the byte. Held-out rows of
    text judge the result: if they do not get closer to the source, the old matrices stay.
    """
    with flow_server(wanted=not (no_prefect or dry_run)) as server:
        _refine(config, server, restart=restart, dry_run=dry_run, as_json=as_json)


def _refine(
    config: RefinementConfig, server: "Api | None", *, restart: bool, dry_run: bool, as_json: bool
) -> None:
    begun = time.monotonic()
    from exl2flow.flows.runs.preparation import prepare_refinement  # these import torch
    from exl2flow.quant.judge.stage import judgement_in_words
    from exl2flow.tasks.stages import REFINE_STAGES

    prepared = prepare_refinement(
        with_local_source(config, plain=as_json, renew=restart), () if restart else REFINE_STAGES
    )
    outline = {"plan": prepared.plan.to_json()}
    if not as_json:
        show(plan_table(_plan_rows(prepared)))
    if dry_run:
        if as_json:
            emit_json(outline)
        return
    with shown(plain=as_json):
        report, failure = _run(prepared, server, restart=restart)
    seconds = time.monotonic() - begun
    if as_json:
        emit_json({**outline, "seconds": round(seconds, 1), **report})
    else:
        print_report(report, seconds)
        tell(judgement_in_words(report["refinement"]))
    if failure is not None:
        raise failure


def _plan_rows(prepared: "Prepared[RefinementConfig]") -> list[tuple[str, str]]:
    """Return (what, value) of what will be done."""
    from exl2flow.core.store.changes import stage_rows  # imports torch

    plan = prepared.plan
    return [
        ("model", str(prepared.config.model)),
        ("reference", f"{plan.model} ({plan.architecture}, {plan.layers} layers)"),
        ("device", plan.device),
        ("calibration", plan.calibration),
        ("output", plan.out),
        ("checkpoints", plan.work_dir),
        *stage_rows(plan.stages, flags()),
    ]


def _run(
    prepared: "Prepared[RefinementConfig]", server: "Api | None", *, restart: bool
) -> tuple[dict[str, Any], ValidationFailed | None]:
    """Run the stages; return the validation report with the judgement, and a failed verdict."""
    from exl2flow.core.store.files import read_json
    from exl2flow.flows.runs.conversion import open_pipeline
    from exl2flow.flows.runs.local import refine_locally
    from exl2flow.inference.validate.stage import REPORT_FILE
    from exl2flow.quant.judge.stage import JUDGEMENT_FILE
    from exl2flow.tasks.stages import REFINE_STAGES

    pipeline = open_pipeline(prepared.config, REFINE_STAGES)
    if restart:
        forget(pipeline)
    failure = None
    try:
        run_flow(server, "refine", prepared, otherwise=refine_locally)
    except ValidationFailed as error:
        failure = error  # the report is shown first
    folder = pipeline.path("validate")
    report = {
        **read_json(folder / REPORT_FILE),
        "refinement": read_json(pipeline.path("judge") / JUDGEMENT_FILE),
        "report_folder": str(folder),
    }
    return report, failure
