"""`exl2flow convert`: plan, run all stages, report."""

import time
from typing import TYPE_CHECKING, Any

from exl2flow.core.errors import Exl2FlowError, ValidationFailed
from exl2flow.core.options.config import ConversionConfig
from exl2flow.flows.cli.console import emit_json, say, show
from exl2flow.flows.cli.options import AsJson, DryRun, NoPrefect, Restart, flags, with_options
from exl2flow.flows.cli.progress import shown
from exl2flow.flows.cli.running import (
    NOT_PUBLISHED,
    ONLY_PUBLISHING,
    flow_server,
    forget,
    run_flow,
)
from exl2flow.flows.cli.sources import with_local_source
from exl2flow.flows.cli.tables import plan_table, print_published, print_report

if TYPE_CHECKING:
    from exl2flow.flows.runs.preparation import Prepared
    from exl2flow.flows.server.temporary import Api

EXAMPLES = (
    "Examples:",
    "exl2flow convert ./Llama-3.2-1B --out ./Llama-3.2-1B-4.0bpw --bpw 4.0",
    "exl2flow convert org/name --out ./out --bpw 4   (fetches the model from the Hub)",
    "exl2flow convert ./Llama-3.2-1B --out ./out --bpw 2.5 --dry-run   (only checks)",
    "exl2flow convert ./Llama-3.2-1B --out ./out --calibration mine.parquet --rows 64",
    "exl2flow convert org/name --out ./out --bpw 4 --publish me/name-exl2",
    "To resume an interrupted conversion, repeat the command. Another `--bpw` with the same "
    "`--work-root` reuses the measurement.",
)


@with_options()
def convert(
    *,
    config: ConversionConfig,
    restart: Restart = False,
    no_prefect: NoPrefect = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Convert a Hugging Face model into an EXL2 model.

    Stages: tokenize, sensitivity, measure, allocate, quantize, compile, validate; some options add
    compose before tokenize, tune after quantize. Each resumes where it stopped and is kept in the
    work root.
    """
    with flow_server(wanted=not (no_prefect or dry_run)) as server:
        _convert(config, server, restart=restart, dry_run=dry_run, as_json=as_json)


def _convert(
    config: ConversionConfig, server: "Api | None", *, restart: bool, dry_run: bool, as_json: bool
) -> None:
    begun = time.monotonic()
    from exl2flow.flows.runs.preparation import prepare  # these import torch
    from exl2flow.flows.runs.release import check_release
    from exl2flow.tasks.stages import STAGES

    check_release(config)
    prepared = prepare(
        with_local_source(config, plain=as_json, renew=restart), () if restart else STAGES
    )
    plan, fit = prepared.plan, prepared.fit
    outline = {"plan": plan.to_json(), **({"fit": fit.to_json()} if fit else {})}
    if not as_json:
        show(plan_table([*plan.rows(flags()), *(fit.rows() if fit else [])]))
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
        if report["published"]:
            print_published(report["published"])
    if isinstance(failure, NOT_PUBLISHED):
        say(ONLY_PUBLISHING)
    if failure is not None:
        raise failure


def _run(
    prepared: "Prepared[ConversionConfig]", server: "Api | None", *, restart: bool
) -> tuple[dict[str, Any], Exl2FlowError | None]:
    """Run the stages and publish; return the report, and the error that the model still caused."""
    from exl2flow.core.store.files import read_json
    from exl2flow.flows.runs.conversion import open_pipeline
    from exl2flow.flows.runs.local import run_locally
    from exl2flow.inference.validate.stage import REPORT_FILE
    from exl2flow.tasks.stages import STAGES

    pipeline = open_pipeline(prepared.config, STAGES)
    if restart:
        forget(pipeline)
    failure, published = None, None
    try:
        made = run_flow(server, "convert", prepared, otherwise=run_locally)
        published = made.published and made.published.to_json()
    except (ValidationFailed, *NOT_PUBLISHED) as error:
        if not pipeline.is_complete("validate"):
            raise
        failure = error  # the report is shown first
    folder = pipeline.path("validate")
    report = read_json(folder / REPORT_FILE)
    return {**report, "published": published, "report_folder": str(folder)}, failure
