"""`exl2flow convert`: plan, run all stages, report."""

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from exl2flow.core.config import ConversionConfig
from exl2flow.core.errors import ValidationFailed
from exl2flow.flows.cli.console import emit_json, say, show
from exl2flow.flows.cli.options import Source, Values, build, with_settings
from exl2flow.flows.cli.progress import shown
from exl2flow.flows.cli.settings import CONVERSION
from exl2flow.flows.cli.sources import with_local_source
from exl2flow.flows.cli.tables import plan_table, print_report

EXAMPLES = (
    "Examples:",
    "exl2flow convert ./Llama-3.2-1B --out ./Llama-3.2-1B-4.0bpw --bpw 4.0",
    "exl2flow convert org/name --out ./out --bpw 4   (fetches the model from the Hub)",
    "exl2flow convert ./Llama-3.2-1B --out ./out --bpw 2.5 --dry-run   (checks only)",
    "exl2flow convert ./Llama-3.2-1B --out ./out --calibration mine.parquet --rows 64",
    "An interrupted conversion goes on where it stopped when the command is repeated; another "
    "`--bpw` into the same `--work-root` measures nothing again.",
)


@with_settings(*CONVERSION)
def convert(
    source: Source,
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder that receives the converted model: new, empty, or of an earlier "
            "conversion of the same source.",
            show_default=False,
        ),
    ],
    values: Values,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Forget the checkpoints of this conversion, begin anew."),
    ] = False,
    no_prefect: Annotated[
        bool,
        typer.Option(
            "--no-prefect",
            help="Run the stages directly. Without it they are a Prefect flow, on the server "
            "of PREFECT_API_URL or a temporary one.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, print the plan or all problems, stop."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object on stdout: plan, report, paths."),
    ] = False,
) -> None:
    """Convert a Hugging Face model into an EXL2 model.

    Stages: tokenize, sensitivity, measure, allocate, quantize, compile, validate; with some
    options also compose before tokenize and tune after quantize. Each is resumable and its result
    is kept under the work root.
    """
    begun = time.monotonic()
    config = with_local_source(build(source, out, values), plain=as_json)
    from exl2flow.quant.fit import find_fit, fitted  # these import torch
    from exl2flow.quant.preflight import preflight

    fit, config = find_fit(config), fitted(config)
    plan = preflight(config)
    outline = {"plan": plan.to_json(), **({"fit": fit.to_json()} if fit else {})}
    if not as_json:
        show(plan_table([*plan.rows(), *(fit.rows() if fit else [])]))
    if dry_run:
        if as_json:
            emit_json(outline)
        return
    with shown(plain=as_json):
        report = _run(config, restart=restart, prefect=not no_prefect)
    seconds = time.monotonic() - begun
    if as_json:
        emit_json({**outline, "seconds": round(seconds, 1), **report})
    else:
        print_report(report, seconds)
    if report["failures"]:
        from exl2flow.inference.validate import check_verdict

        check_verdict(Path(report["report_folder"]))


def _run(config: ConversionConfig, *, restart: bool, prefect: bool) -> dict[str, Any]:
    """Run the stages and return the validation report, whatever its verdict."""
    from exl2flow.core.files import read_json
    from exl2flow.flows.cli.restart import forget
    from exl2flow.flows.conversion import open_pipeline
    from exl2flow.inference.validate import REPORT_FILE
    from exl2flow.tasks.stages import STAGES

    pipeline = open_pipeline(config, STAGES)
    if restart:
        forget(pipeline)
    try:
        if prefect:
            _run_flow(config)
        else:
            from exl2flow.flows.local import run_locally

            run_locally(config)
    except ValidationFailed:
        pass  # the report is shown first; its verdict is raised again after it
    folder = pipeline.path("validate")
    return {**read_json(folder / REPORT_FILE), "report_folder": str(folder)}


def _run_flow(config: ConversionConfig) -> None:
    """Run the Prefect flow; its own console log would repeat the progress shown here."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "ERROR")
    from exl2flow.flows.convert import convert as flow
    from exl2flow.flows.server import api

    with api() as server:
        if server.is_temporary:
            say("starting a temporary Prefect server; PREFECT_API_URL names a lasting one")
        server.wait()
        say(f"this run in the Prefect UI: {server.ui_url}")
        flow(config)
